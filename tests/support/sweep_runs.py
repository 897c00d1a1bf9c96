"""Runs of a sweep that train nothing and end as they are told to."""

import json

EVALUATION = {
    "rewards": {"short": [[-1.0, -0.5, -0.25, 0.0], [-0.1, -0.2, -0.3, -0.4]]},
    "lengths": [[1, 2, 3, 4], [5, 6, 7, 8]],
    "objectives": {"short": "mean"},
    "weights": {"short": 1.0},
    "max_length": 8,
}
# The program of such a run. The file "how" beside the folder of the sweep has the end of each point by name.
CODE = """
import json, os, pathlib, signal, sys, time
out = pathlib.Path(next(a for a in sys.argv if a.startswith("--train.out="))[12:])
here = out.parent.parent
with (here / "ran").open("a") as file: file.write(out.name + "\\n")
how = json.loads((here / "how").read_text()).get(out.name, "finish")
out.mkdir(exist_ok=True)
print("SAFE", sys.flags.safe_path)
if how == "fail": sys.exit("one\\nerror: the second\\n\\nthird")
if how == "raise": raise KeyError("unnamed")
if how == "full": sys.exit("error: cannot write into there: no room")
if how == "full log": raise OSError(28, "No space left on device")
if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
if how == "save": sys.exit(0)
if how == "deaf": time.sleep(60)
if how == "meet":
    while (here / "ran").read_text().count("\\n") < 2: time.sleep(0.01)
if how == "hold":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    (here / "held").write_text("")
    time.sleep(60)
(out / "evaluation.json").write_text(EVALUATION)
(out / "metrics.jsonl").write_text('{"step": 0, "kl": 0.125}\\n')
if how == "unreported": os.kill(os.getpid(), signal.SIGKILL)
(out / "report.html").write_text("")
""".replace("EVALUATION", repr(json.dumps({"after": EVALUATION})))
