"""`nlgrpo completion`: what bash completes, and scripts of the other shells."""

import subprocess

import pytest
import shtab

from nlgrpo import cli
from nlgrpo.apps.shell.shell import parser

TRY = """
source {script}
complete -p nlgrpo > /dev/null || exit 1
while read -r -a COMP_WORDS; do
    [ "${{COMP_WORDS[-1]}}" = _ ] && COMP_WORDS[-1]=""
    COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
    COMPREPLY=()
    _shtab_nlgrpo nlgrpo "${{COMP_WORDS[$COMP_CWORD]}}"
    echo "${{COMPREPLY[*]}}"
done
"""
LINES = {
    "nlgrpo re": {"recipes", "report", "reward-model"},
    "nlgrpo value _": {"train", "compress"},
    "nlgrpo train --rollout.e": {"--rollout.engine"},
    "nlgrpo train --rollout.engine _": {"nlgrpo", "vllm"},
    "nlgrpo reward-model train --data.chosen": {"--data.chosen-column"},
    "nlgrpo value compress --compress.v": {"--compress.values"},
    "nlgrpo generate --tem": {"--temperature", "--template"},
    "nlgrpo train my.to": {"my.toml"},
}


@pytest.fixture(scope="module")
def parsed():
    return parser(cli.COMMANDS)


def test_bash_completes_commands_options_choices_and_files(parsed, tmp_path):
    script = tmp_path / "nlgrpo.bash"
    script.write_text(shtab.complete(parsed, shell="bash"))
    (tmp_path / "my.toml").touch()
    typed = "".join(f"{line}\n" for line in LINES)
    done = subprocess.run(["bash", "-c", TRY.format(script=script)], input=typed, capture_output=True, text=True,
                          check=True, cwd=tmp_path)  # fmt: skip
    found = {line: set(words.split()) for line, words in zip(LINES, done.stdout.splitlines(), strict=True)}
    assert found == LINES


def test_every_command_is_completed(parsed):
    (commands,) = (action for action in parsed._actions if action.choices and "train" in action.choices)
    assert set(commands.choices) == set(cli.COMMANDS)
    for name, command in commands.choices.items():
        options = [word for action in command._actions for word in action.option_strings]
        assert len(options) > 2 or name in ("value", "reward-model", "recipes", "completion"), name


def test_the_command_prints_a_script(capsys):
    assert cli.main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef nlgrpo")
    with pytest.raises(SystemExit):
        cli.main(["completion", "cmd"])
