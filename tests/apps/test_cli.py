"""The console command: what it prints, its exit status, and that bad input ends in a message."""

import ast
import errno
import json
import os
import resource
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import nlgrpo
from nlgrpo import cli
from nlgrpo.config.recipes import RECIPES
from nlgrpo.model import hf_weights
from nlgrpo.runtime.console import how_to_resume


@pytest.fixture
def call(capsys):
    """Exit status, stdout and stderr of ``nlgrpo *arguments``."""

    def run(*arguments):
        try:
            status = cli.main(list(arguments))
        except SystemExit as ended:
            status = ended.code
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return status, shown.out, shown.err

    return run


def shell(command, folder):
    """Exit statuses of a pipe in bash, and what it wrote to stderr; ``nlgrpo`` is this Python's."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = command.replace("nlgrpo ", f"{sys.executable} -m nlgrpo.cli ") + '; echo "${PIPESTATUS[@]}"'
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, check=False)
    return [int(status) for status in done.stdout.splitlines()[-1].split()], done.stdout, done.stderr


# --- generate ---------------------------------------------------------------------------------------------------------


def test_generate_continues_every_prompt(call):
    prompts = ("Once upon a time", "The dog")
    status, out, _ = call("generate", *prompts, "--samples", "2", "--max-new-tokens", "6")
    assert status == 0
    lines = out.splitlines()
    assert [line.startswith(prompt) for prompt, line in zip(("Once", "Once", "The", "The"), lines[::2], strict=True)]
    assert lines[1::2] == ["    [6 tokens, length]"] * 4


def test_the_same_seed_draws_the_same_text(call):
    arguments = ("generate", "Once upon a time", "--samples", "3", "--max-new-tokens", "12")
    first, again, other = (call(*arguments, "--seed", seed)[1] for seed in ("5", "5", "6"))
    assert first == again
    assert first != other


def test_json_holds_the_log_probs_that_transformers_computes(call):
    prompt = "Once upon a time"
    status, out, _ = call("generate", prompt, "--samples", "3", "--max-new-tokens", "20", "--json")
    assert status == 0
    source = hf_weights.locate("story-lm")
    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModelForCausalLM.from_pretrained(source)
    rows = [json.loads(line) for line in out.splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert set(row) == {"prompt", "text", "ids", "logprobs", "finish_reason"}
        assert row["prompt"] == prompt
        assert row["text"] == tokenizer.decode(row["ids"], skip_special_tokens=True)
        assert row["finish_reason"] == ("stop" if row["ids"][-1] == tokenizer.eos_token_id else "length")
        before = tokenizer(prompt).input_ids
        with torch.no_grad():
            logits = model(torch.tensor([before + row["ids"]])).logits[0, len(before) - 1 : -1].float()
        truth = logits.log_softmax(-1).gather(-1, torch.tensor(row["ids"])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row["logprobs"]), truth, atol=1e-4, rtol=0)


def test_temperature_0_is_the_likeliest_text(call):
    arguments = ("generate", "Once upon a time", "--temperature", "0", "--max-new-tokens", "8", "--json")
    drawn = {json.loads(call(*arguments, "--seed", str(seed))[1])["text"] for seed in range(3)}
    source = hf_weights.locate("story-lm")
    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModelForCausalLM.from_pretrained(source)
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    greedy = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert drawn == {tokenizer.decode(greedy, skip_special_tokens=True)}


def test_an_empty_prompt_begins_a_text(call):
    status, out, _ = call("generate", "", "--max-new-tokens", "5")
    assert status == 0
    assert out.endswith("    [5 tokens, length]\n")


def test_brackets_are_text_not_markup(call):
    assert call("generate", "a [bold] [/x]", "--max-new-tokens", "2")[1].startswith("a [bold] [/x]")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no prompt"),
        (["a " * 400], "prompt 0 has 402 tokens; with max_new_tokens = 128 this exceeds the model's context of 160"),
        (["hi", "--max-new-tokens", "0"], "max_new_tokens = 0"),
        (["hi", "--max-new-tokens", "9" * 20], "exceeds the model's context of 160"),
        (["hi", "--samples", "0"], "samples = 0"),
        (["hi", "--samples", "9" * 20], "expected a number in [1, 2^31)"),
        (["hi", "--seed", "-1"], "seed = -1"),
        (["hi", "--seed", "9" * 30], "expected a number in [0, 2^63)"),
        (["hi", "--temperature", "-1"], "temperature = -1.0"),
        (["hi", "--temperature", "nan"], "temperature = nan"),
        (["hi", "--top-p", "2"], "top_p = 2.0"),
        (["hi", "--top-k", "-2"], "top_k = -2"),
        (["hi", "--samples", "two"], "'two'"),
        (["hi", "--smaples", "2"], "--samples"),
        (["hi", "--model", "no-such-model"], "model 'no-such-model' is neither a directory, nor embedded"),
        (["hi", "--model", "no/such/model"], "model 'no/such/model' is neither a directory"),
        (["hi", "--model", "~nobody/model"], "model '~nobody/model' is neither a directory"),
        (["hi", "--model", "x" * 5000], "is neither a directory"),
        (["hi", "--model", "/"], "/ has no config.json, so it is not a Hugging Face model directory"),
        (["hi", "--model", ""], "has no config.json"),
    ],
)
def test_generate_refuses(arguments, said, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    status, out, err = call("generate", *arguments)
    assert status in (1, 2)
    assert said in " ".join(err.split())
    assert not out


# --- the other commands -----------------------------------------------------------------------------------------------


def test_recipes_are_listed(call):
    status, out, _ = call("recipes")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == list(RECIPES)
    assert all(len(line.split()) > 3 for line in out.splitlines())


@pytest.mark.parametrize("arguments", [(), ("help",), ("--help",), ("-h",)])
def test_usage_names_every_command(arguments, call):
    status, out, _ = call(*arguments)
    assert status == 0
    assert all(f"\n  {name} " in out for name in ("train", "generate", "recipes", "report", "compare"))


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_has_help(command, call):
    status, out, _ = call(command, "--help")
    assert status == 0
    assert out.startswith(f"usage: nlgrpo {command}")


def processor_seconds(script):
    """Seconds that the processor works on a script."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.fixture(scope="module")
def seconds_of_pytorch():
    return min(processor_seconds("import torch") for _ in range(3))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_help_takes_no_second(command, seconds_of_pytorch):
    """Where importing PyTorch takes 1.7 s, it takes at most 0.7 s; a ratio holds on a busy machine too."""
    script = (
        "import sys\nfrom nlgrpo import cli\n"
        f"try: cli.main([{command!r}, '--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    limit = 0.4 * seconds_of_pytorch
    assert any(processor_seconds(script) < limit for _ in range(3))  # the first of three may compile modules


def test_help_leaves_the_parser_of_python_as_it_was(call):
    parse = ast.parse
    status, out, _ = call("train", "--help")
    assert status == 0
    assert "AdamW's epsilon" in out
    assert ast.parse is parse


@pytest.mark.parametrize(
    ("program", "environment", "expected"),
    [
        ("nlgrpo", {}, "resume with: nlgrpo train 'my run.toml'"),
        ("venv/bin/nlgrpo", {}, "resume with: venv/bin/nlgrpo train 'my run.toml'"),
        ("train.py", {}, "run the same command again to resume"),
        ("nlgrpo", {"RANK": "0"}, "run the same command again to resume"),  # of torchrun
    ],
)
def test_a_command_that_was_stopped_says_how_to_resume(tmp_path, monkeypatch, program, environment, expected):
    installed = tmp_path / "bin" / "nlgrpo"
    local = tmp_path / "work" / "venv" / "bin" / "nlgrpo"
    for path in (installed, local):
        path.parent.mkdir(parents=True)
        path.touch(0o755)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PATH", str(installed.parent))
    monkeypatch.delenv("RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    started = {"nlgrpo": installed, "venv/bin/nlgrpo": local}.get(program, program)
    monkeypatch.setattr(sys, "argv", [str(started), "train", "my run.toml"])
    assert how_to_resume() == expected


@pytest.mark.parametrize("program", ["/nonexistent/nlgrpo", "nlgrpo"])
def test_a_command_whose_program_is_gone_can_still_be_stopped(tmp_path, monkeypatch, program):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nlgrpo").touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", [program, "train"])
    assert how_to_resume() == "run the same command again to resume"


def test_version(call):
    assert call("--version") == (0, f"{nlgrpo.__version__}\n", "")


def test_python_m_nlgrpo_is_the_command():
    done = subprocess.run([sys.executable, "-m", "nlgrpo", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{nlgrpo.__version__}\n", "")
    assert subprocess.run([sys.executable, "-m", "nlgrpo", "trian"], capture_output=True).returncode == 2


def test_the_list_of_commands_is_fast():
    """Nothing heavy is imported: torch and transformers take seconds."""
    code = "import sys; from nlgrpo import cli; cli.main([]); print(len({'torch', 'rich', 'numpy'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0"


def test_an_unknown_command(call):
    for given, said in (
        ("trian", "unknown command 'trian'; did you mean 'train'?"),
        ("eval", "did you mean 'evaluate'?"),
        ("zzz", f"the commands are: {', '.join(cli.COMMANDS)}"),
        ("", "unknown command ''"),
    ):
        status, out, err = call(given)
        assert (status, out) == (2, "")
        assert said in err


def test_train_runs_a_recipe(call):
    status, out, _ = call("train", "length-mean", "--dry-run")
    assert status == 0
    assert "0.5 mean(short)" in out


@pytest.mark.parametrize("command", ["report", "compare"])
def test_folders_that_hold_no_run(command, call, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    for name, said in (
        ("nothere", "is not a folder"),
        ("file", "is not a folder"),
        ("other", "has none of config.json"),
    ):
        status, out, err = call(command, str(tmp_path / name))
        assert status == 2
        assert err.startswith(f"error: {tmp_path / name} {said}")
        assert "give a folder written by `nlgrpo train`" in err
        assert not out
    assert list((tmp_path / "other").iterdir()) == []


def test_report_and_compare_need_their_arguments(call, tmp_path):
    for arguments, said in (
        (["report"], "no folder given"),
        (["compare"], "no runs to compare"),
        (["compare", str(tmp_path), "--out", str(tmp_path / "x.txt")], "must end in .png, .pdf or .svg"),
    ):
        status, _, err = call(*arguments)
        assert status == 2
        assert said in err


# --- as a process -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_from_another_folder(tmp_path):
    """The command finds its model from any folder."""
    statuses, out, err = shell("nlgrpo generate Once --max-new-tokens 3", tmp_path)
    assert statuses == [0]
    assert "    [3 tokens, length]" in out
    assert err == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_pipe_to_head(tmp_path):
    (_, head), out, err = shell("nlgrpo train --help | head -1", tmp_path)
    assert out.startswith("usage: nlgrpo train")
    assert (head, err) == (0, "")


@pytest.mark.parametrize(
    "command", ["recipes", "train --help", "--version", "generate a --max-new-tokens 2 --samples 99"]
)
def test_a_closed_pipe(command, monkeypatch, capfd):
    """A closed pipe ends the command with status 1, without an error from Python's flush at exit."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(command.split()) == 1
        stdout.flush()
    assert capfd.readouterr().err == ""


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("nlgrpo.apps.shell.shell.list_recipes", interrupted)
    assert cli.main(["recipes"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(("number", "lines"), [(errno.EIO, 1), (errno.ENOSPC, 1), (errno.ENOENT, None)])
def test_the_error_of_a_disk_is_one_line(number, lines, monkeypatch, capsys):
    def fails(arguments):
        raise OSError(number, os.strerror(number), "/data/x.json")

    monkeypatch.setattr("nlgrpo.apps.shell.shell.list_recipes", fails)
    if lines is None:
        assert cli.main(["recipes"]) == 1
        assert "FileNotFoundError: [Errno 2] No such file" in capsys.readouterr().err
    else:
        assert cli.main(["recipes"]) == 2
        said = f"error: /data/x.json: {os.strerror(number)}. Run the same command again to resume.\n"
        assert capsys.readouterr().err == said
