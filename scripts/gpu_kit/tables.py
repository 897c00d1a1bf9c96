"""Write the tables of GPU measurements into the documentation: ``make gpu-tables``.

They come from the newest files of each card in ``bench/results/gpu``, and say "not measured" where there is none. What
stands between two markers of a page is replaced. ``--check`` writes nothing, and ends with 1 if a file would change.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpu_kit import plan
from gpu_kit.plan import ROOT

NONE = "not measured"
MISSING = "GPU code is written and tested without a GPU, and **not measured yet**"
NEEDED = {"format", "date", "card", "driver", "versions", "commit", "dirty", "steps", "rehearsal"}
MARKS = ("<!-- gpu -->", "<!-- /gpu -->")
TOP = 8  # kernels of an update that the page shows


def newest(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the files of each card. A step comes from the newest file that ran it: ``check`` and ``speed`` make two.

    Raises ValueError, with the name of the file, for one that is no JSON, of another format, or of a rehearsal.
    """
    records = [read(path) | {"file": path.name} for path in folder.glob("*.json")]
    found: dict[str, dict[str, Any]] = {}
    for record in sorted(records, key=lambda record: (record["date"], record["file"])):
        for entry in record["steps"].values():
            entry["origin"] = f"{record['file']}, `{str(record['commit'])[:7]}`"
        before = found.get(record["card"], {"steps": {}})
        ran = {name: entry for name, entry in record["steps"].items() if entry["status"] != "skipped"}
        found[record["card"]] = record | {"steps": record["steps"] | before["steps"] | ran}
    return dict(sorted(found.items()))


def read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from error
    if not isinstance(record, dict) or record.get("format") != plan.FORMAT:
        got = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{path}: expected a result of the GPU kit of format {plan.FORMAT}, got {got!r}")
    if missing := NEEDED - record.keys():
        raise ValueError(f"{path}: the keys {', '.join(sorted(missing))} are missing")
    if record["rehearsal"]:
        raise ValueError(f"{path}: this is a rehearsal on a CPU, which measures nothing")
    return record


# --- what the files hold ----------------------------------------------------------------------------------------------


def values(record: dict[str, Any], step: str) -> dict[str, Any]:
    """Values of a step; empty if it has not run."""
    found: dict[str, Any] = record["steps"].get(step, {}).get("values", {})
    return found


# --- sentences --------------------------------------------------------------------------------------------------------


def sentence(records: Iterable[dict[str, Any]], link: str) -> str:
    """What the README says: one sentence for each card, with ``link`` to the tables."""
    said = []
    for record in records:
        parts = []
        rows = values(record, "engine").get("0.5B", {}).get("rows", [])
        rates = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
        if rates:
            parts.append(f"a 0.5B model samples {max(rates):,.0f} tokens per second")
        if "ratio" in values(record, "step"):
            peer = "TRL's" if "trl" in values(record, "step") else "a reference loop's"
            parts.append(f"a training step takes 1/{values(record, 'step')['ratio']:.2g} of {peer} time")
        done = " and ".join(parts) or "the checks ran"
        said.append(f"On one {record['card']}, {done} ([measured]({link}))")
    return ". ".join(said) or MISSING


# --- tables -----------------------------------------------------------------------------------------------------------


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: Any, digits: int = 3) -> str:
    """A number with ``digits`` significant digits, and thousands separated; "not measured" for None."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def scaled(row: dict[str, Any], key: str, factor: float) -> str:
    value = row.get(key)
    return number(None if value is None else factor * value)


def gib(row: dict[str, Any], key: str) -> str:
    return scaled(row, key, 2.0**-30)


def page(records: Iterable[dict[str, Any]]) -> str:
    """All tables of all cards."""
    parts = []
    for record in records:
        sections = [about(record), checks(record), engine(record), ops(record), update(record), step(record)]
        parts.append("\n\n".join(sections))
    return "\n\n".join(parts) or f"No GPU has run the kit: **{NONE}**."


def about(record: dict[str, Any]) -> str:
    found = record["versions"]
    names = ("torch", "triton", "transformers")
    versions = ", ".join(f"{name} {found[name]}" for name in names if found.get(name))
    changed = " with local changes" if record["dirty"] else ""
    ceilings = values(record, "ceilings")
    lines = [
        f"## {record['card']}",
        "",
        f"The newest of its files: driver {record['driver']}, {versions}, commit "
        f"`{str(record['commit'])[:12]}`{changed}, {record['date'][:10]} "
        f"(`bench/results/gpu/{record['file']}`). The table names the file of each step.",
        "",
        f"A large copy moves {scaled(ceilings, 'copy_bytes_per_second', 1e-12)} TB/s, read and written; a bfloat16 "
        f"product of 8192 x 8192 x 8192 runs at {scaled(ceilings, 'product_flops', 1e-12)} TFLOP/s; launching an "
        f"addition takes {scaled(ceilings, 'launch_of_an_add_seconds', 1e6)} µs.",
    ]
    return "\n".join(lines)


def checks(record: dict[str, Any]) -> str:
    rows = []
    for one in plan.STEPS:
        entry = record["steps"].get(one.name, {"status": NONE})
        seconds = number(entry.get("seconds"))
        origin = entry.get("origin", "")
        rows.append([one.name, one.about, entry["status"], seconds, cell(entry.get("error", "")), origin])
    return table(["step", "what it does", "result", "s", "", "file, commit"], rows)


def cell(text: str) -> str:
    """A text as a cell of a table: one line, no bars."""
    return " ".join(text.split()).replace("|", "/")[:160]


def engine(record: dict[str, Any]) -> str:
    found = values(record, "engine")
    rows = []
    for model, shape in found.items():
        if not isinstance(shape, dict) or "rows" not in shape or model == "peers":
            continue
        for row in shape["rows"]:
            if "error" in row:
                rows.append([model, str(row["rows"]), row["error"], *[""] * 7])
                continue
            rows.append([
                model, number(row["rows"]), number(row["tokens_per_second"]), scaled(row, "seconds_per_token", 1e3),
                scaled(row, "kernel_seconds_per_token", 1e3), number(row["launches_per_layer"]),
                scaled(row, "sampler_seconds_per_token", 1e3) if row["sampler_seconds_per_token"] else NONE,
                scaled(row, "attention_seconds_per_token", 1e3),
                gib(row, "peak_bytes"), gib(row, "planned_bytes"),
            ])  # fmt: skip
    head = ["model", "rows", "tokens/s", "ms per token", "kernels, ms", "launches per layer", "sampler, ms",
            "attention, ms", "peak, GiB", "planned, GiB"]  # fmt: skip
    lines = ["### Sampling", "", table(head, rows) if rows else f"Sampling: {NONE}."]
    peers = found.get("peers", {})
    for peer in ("transformers", "vllm"):
        if isinstance(peers.get(peer), dict):
            lines += ["", peer_line(peer, peers)]
    return "\n".join(lines)


def peer_line(peer: str, peers: dict[str, Any]) -> str:
    row = peers[peer]
    if "error" in row:
        return f"{peer}: {cell(row['error'])}."
    rate = row.get("tokens_per_second", row["tokens_per_second_with_prefill"])
    return f"{peer}, {peers['model']}, {peers['rows']} rows: {number(rate)} tokens/s."


def ops(record: dict[str, Any]) -> str:
    rows = []
    for name, sides in values(record, "ops").items():
        if not name.startswith("linear_policy_loss"):
            continue
        for side, row in sides.items():
            shown = cell(row["error"]) if "error" in row else number(row["ms"])
            rows.append([name, side, shown, number(row["added_gib"]) if "added_gib" in row else ""])
    for row in values(record, "ops").get("sampler", []):
        name = f"sample_tokens, {row['rows']} rows"
        rows.append([name, "ours", scaled(row, "seconds", 1e3), ""])
    head = ["op", "side", "ms, forward and backward", "GiB beyond the arguments"]
    lines = ["### Ops", "", table(head, rows) if rows else f"Ops: {NONE}."]
    cut = [
        [number(row["width"]), number(row["rows"]), number(row["vocab"]), scaled(row, "product", 1e3),
         scaled(row, "sampler", 1e3)]
        for row in values(record, "ops").get("cut_logits", [])
    ]  # fmt: skip
    if cut:
        lines += ["", "Logits with all rows of the head, and with the tokenizer's rows alone, whose number is odd:", ""]
        lines += [table(["width", "rows", "vocabulary", "product, ms", "sampler, ms"], cut)]
    return "\n".join(lines)


def update(record: dict[str, Any]) -> str:
    lines = ["### Update", ""]
    cases = {name: row for name, row in values(record, "update").items() if isinstance(row, dict) and "seconds" in row}
    if not cases:
        return "\n".join([*lines, f"Update: {NONE}."])
    rows = [
        [name, number(row["tokens"]), number(row["seconds"]), scaled(row, "share_of_peak", 100.0),
         gib(row, "peak_bytes"), gib(row, "planned_bytes")]
        for name, row in cases.items()
    ]  # fmt: skip
    lines.append(table(["update", "tokens", "s", "% of the peak rate", "peak, GiB", "planned, GiB"], rows))
    for name, row in cases.items():
        kernels = [
            [f"`{cell(top['kernel'])[:80]}`", scaled(top, "seconds", 1e3), number(top["launches"])]
            for top in row.get("top", [])[:TOP]
        ]
        if kernels:
            lines += ["", f"The kernels that take longest, {name}:", "", table(["kernel", "ms", "launches"], kernels)]
    return "\n".join(lines)


def step(record: dict[str, Any]) -> str:
    found = values(record, "step")
    rows = []
    for side, title in (("ours", "nlgrpo"), ("loop" if "loop" in found else "trl", "TRL")):
        row = found.get(side)
        if row is None:
            rows.append([title, NONE, "", ""])
        else:
            rows.append([row.get("title", title), number(row["seconds"]), number(row["tokens_per_s"]),
                         scaled(row, "peak_mib", 1 / 1024)])  # fmt: skip
    head = ["trainer", "s per step", "tokens/s", "peak, GiB"]
    return "\n".join(["### A training step against TRL", "", table(head, rows)])


# --- files ------------------------------------------------------------------------------------------------------------


def texts(records: dict[str, dict[str, Any]], root: Path) -> dict[Path, str]:
    """Return the new content of every generated file."""
    found = list(records.values())
    pages = {
        Path("README.md"): sentence(found, "experiments/gpu/README.md"),
        Path("docs/guides/kernels.md"): sentence(found, "../../experiments/gpu/README.md") + ".",
        Path("experiments/gpu/README.md"): "\n\n" + page(found) + "\n\n",
    }
    return {root / path: between((root / path).read_text("utf-8"), text, path) for path, text in pages.items()}


def between(text: str, new: str, path: Path) -> str:
    """Replace what is between the markers of a page. Raises ValueError if it does not have both once."""
    begin, end = MARKS
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{path}: expected {begin} and {end}, once each and in this order")
    return text[: text.index(begin) + len(begin)] + new + text[text.index(end) :]


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="gpu_kit.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a file would change")
    options = parser.parse_args(arguments)
    try:
        new = texts(newest(root / plan.RESULTS.relative_to(ROOT)), root)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    changed = [path for path, text in new.items() if not path.is_file() or path.read_text("utf-8") != text]
    for path in changed:
        print(f"{'would change' if options.check else 'wrote'} {path.relative_to(root)}")
        if not options.check:
            path.write_text(new[path], "utf-8")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
