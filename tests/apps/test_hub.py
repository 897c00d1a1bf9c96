"""`nlgrpo push` and `train.push` against a local Hub: what arrives, the model card, and errors."""

import base64
import json
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
from huggingface_hub import ModelCard
from huggingface_hub.repocard import metadata_load
from transformers import AutoModelForCausalLM

from nlgrpo import cli, train
from nlgrpo.apps.report import hub
from nlgrpo.apps.report.compare import compare
from nlgrpo.apps.reward_model.config import from_arguments as reward_model_arguments
from nlgrpo.config import toml_file
from nlgrpo.config.recipes import from_arguments
from nlgrpo.config.schema import Config, to_dict
from nlgrpo.errors import UserError
from nlgrpo.training.tracking.run_files import read_jsonl

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")

TINY = ("length-bon", "--rollout.prompts", "2", "--rollout.samples", "4", "--rollout.max-new-tokens", "8",
        "--data.limit", "4",
        "--optim.lr", "1e-2", "--evaluation.prompts", "4", "--evaluation.samples", "4", "--data.source",
        "story-prompts", "--train.steps", "2")  # fmt: skip


class Hub:
    """The calls of the Hub's API that an upload makes; files are kept in memory."""

    def __init__(self):
        self.repositories, self.files, self.tokens, self.status, self.commits = {}, {}, set(), 200, 0

    def __enter__(self):
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fake.tokens.add(self.headers.get("Authorization"))
                status, answer = fake.answer(self.path, body)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, path, body):
        if self.status != 200:
            return self.status, {"error": "no"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.repositories[name] = asked
            return 200, {"url": f"{self.url}/{name}", "name": name, "id": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            return 200, {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        if "/commit/" in path:
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            self.commits += 1
            repository = path.removeprefix("/api/models/").partition("/commit/")[0]
            url = f"{self.url}/{repository}/commit/{'1' * 40}"
            return 200, {"commitUrl": url, "commitOid": "1" * 40, "pullRequestUrl": None}
        return 404, {"error": path}


@pytest.fixture
def fake(monkeypatch):
    with Hub() as server:
        api = huggingface_hub.HfApi
        for name, value in (("HF_HUB_OFFLINE", False), ("ENDPOINT", server.url)):
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setattr(hub, "HfApi", lambda **options: api(endpoint=server.url, token="hf_x", **options))
        yield server


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "story"
    assert train.main([*TINY, "--train.out", str(folder)]) == 0
    (folder / "report.html").write_text("the report")  # the figures are not drawn in these tests
    return folder


def test_a_run_arrives_as_a_model_that_loads(run, fake, tmp_path, capsys):
    assert cli.main(["push", str(run), "--repo", "me/story", "--private"]) == 0
    assert capsys.readouterr().out.strip() == f"{fake.url}/me/story"
    assert True in fake.repositories["me/story"].values() or "private" in fake.repositories["me/story"].values()
    assert fake.tokens == {"Bearer hf_x"}
    assert fake.commits == 1
    for name, content in fake.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "nlgrpo/report.html",
    } <= fake.files.keys()
    assert fake.files["nlgrpo/report.html"] == b"the report"
    assert fake.files["nlgrpo/metrics.jsonl"] == (run / "metrics.jsonl").read_bytes()
    config, _ = from_arguments([str(tmp_path / "nlgrpo" / "run.toml")])
    saved, again = json.loads((run / "config.json").read_text()), json.loads(json.dumps(to_dict(config)))
    assert {key for key in saved if saved[key] != again[key]} <= {"name"}  # that of the file


def test_the_model_card(run, tmp_path):
    text = hub.model_card(run, "me/story")
    (tmp_path / "README.md").write_text(text)
    assert ModelCard(text).data.to_dict() == metadata_load(tmp_path / "README.md")
    data = metadata_load(tmp_path / "README.md")
    assert data["library_name"] == "transformers"
    assert "base_model" not in data  # a local path is none
    assert "# story\n" in text
    assert "| short | `length(target=25, scale=128)` | `bon:4` | 0.5 |" in text
    assert "4 prompts x 4 samples, 95% intervals over prompts." in text
    rows = [line for line in text.splitlines() if line.startswith("| weighted sum | best-of-4 |")]
    assert len(rows) == 1
    assert rows[0].count("[") == 2
    assert "2 steps of 2 prompts x 4 completions" in text
    assert str(run.parent) not in text


def test_a_reward_model(fake, tmp_path, monkeypatch, capsys):
    """Its card has its own results, and its file trains it again with its own defaults."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": f"{i + 2}"} for i in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [
        "--data.source",
        "pairs.jsonl",
        "--model.path",
        "numbers-lm",
        "--train.pairs",
        "4",
        "--train.epochs",
        "1",
    ]
    lr = str(Config().optim.lr)  # the default of `nlgrpo train`, and not of this command
    assert cli.main(["reward-model", "train", *options, "--optim.lr", lr, "--evaluation.pairs", "3"]) == 0
    (tmp_path / "runs" / "reward-model" / "report.html").write_text("the report")
    assert cli.main(["push", "runs/reward-model", "--repo", "me/judge"]) == 0
    card = fake.files["README.md"].decode()
    data = ModelCard(card).data
    assert data.pipeline_tag == "text-classification"
    assert data.tags == ["nlgrpo", "reward-model"]
    assert "A reward model, trained with nlgrpo from `numbers-lm` on `pairs.jsonl`." in card
    assert "| accuracy | " in card
    assert "3 held-out pairs (95% intervals)." in card
    assert "`nlgrpo reward-model train nlgrpo/run.toml` trains this model again." in card
    (tmp_path / "run.toml").write_bytes(fake.files["nlgrpo/run.toml"])
    saved = json.loads((tmp_path / "runs" / "reward-model" / "config.json").read_text())
    again = json.loads(json.dumps(to_dict(reward_model_arguments([str(tmp_path / "run.toml")]))))
    assert saved == again
    with pytest.raises(UserError, match="is a run of `nlgrpo reward-model train`, which has no completions"):
        compare(["runs/reward-model"], tmp_path / "compare.png")


def test_a_base_model_on_the_hub_is_in_the_metadata(run, tmp_path):
    copy = tmp_path / "copy"
    (copy / "model").mkdir(parents=True)
    (copy / "model" / "config.json").write_text("{}")
    config = json.loads((run / "config.json").read_text())
    config["model"]["path"], config["data"]["source"] = "Qwen/Qwen3-0.6B", "trl-lib/tldr"
    (copy / "config.json").write_text(json.dumps(config))
    data = ModelCard(hub.model_card(copy, "story")).data
    assert data.base_model == "Qwen/Qwen3-0.6B"
    assert data.datasets == ["trl-lib/tldr"]
    assert "The run was not evaluated." in hub.model_card(copy, "story")


def test_train_push(fake, tmp_path, capsys):
    out = tmp_path / "run"
    assert train.main([*TINY, "--train.out", str(out), "--train.push", "me/direct"]) == 0
    assert f"pushed  {fake.url}/me/direct" in capsys.readouterr().out
    assert "model.safetensors" in fake.files


def test_a_failed_push_says_what_to_do_and_the_run_is_complete(fake, tmp_path, capsys):
    out = tmp_path / "run"
    fake.status = 403
    assert train.main([*TINY, "--train.out", str(out), "--train.push", "me/direct"]) == 2
    error = capsys.readouterr().err
    assert "cannot push to me/direct: " in error
    assert f"The run is saved; `nlgrpo push {out} --repo me/direct` tries again" in error
    assert (out / "model" / "model.safetensors").is_file()
    assert len(read_jsonl(out / "metrics.jsonl")) == 2
    fake.status = 200
    assert cli.main(["push", str(out), "--repo", "me/direct"]) == 0


def test_errors(run, tmp_path, capsys, fake):
    for arguments, message in (
        ((str(run),), "give the repository: nlgrpo push RUN --repo USER/NAME"),
        ((str(run), "--repo", "a/b/c"), "a/b/c"),
        ((str(tmp_path), "--repo", "me/x"), "has no trained model: the run has not finished"),
    ):
        assert cli.main(["push", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert train.main([*TINY, "--train.push", "a//b", "--train.out", str(tmp_path / "x")]) == 2
    assert "train.push = 'a//b'" in capsys.readouterr().err
    assert cli.main(["push", str(run), "--repo", "me/x", "--dry-run"]) == 0
    assert capsys.readouterr().out == hub.model_card(run, "me/x")
    assert fake.commits == 0


def test_toml_is_what_was_written():
    values = {"recipe": "length-bon", "train": {"steps": 3, "out": 'a"b\\c\nd', "track": ["wandb"], "push": None},
              "loss": {"eps_high": float("inf"), "kl_importance": True},
              "data": {"mixture": {"a b.jsonl": 3, "data/c.jsonl": {"weight": 0.5, "limit": 7}}, "tools": []},
              "environment": {"args": {"turns": 2, "names": ["x", "y"], "deep": {"is it": {"so": True}}}},
              "rewards": {"x": {"function": "length(target=1, scale=2)", "weight": 0.5}}}  # fmt: skip
    read = tomllib.loads(toml_file.text(values))
    del values["train"]["push"]
    assert read == values
