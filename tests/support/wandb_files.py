"""The file that W&B writes for uploads, read back."""

import json


def blocks(content, size=32768):
    """Records of a LevelDB log after a header of 7 bytes, W&B's file for uploads. Large ones are in several pieces."""
    place, whole = 7, b""
    while place + 7 <= len(content):
        if size - place % size < 7:  # no room for a header: zeros up to the next block
            place += size - place % size
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # full, or the last piece
            yield whole
            whole = b""


def records(path):
    """The run, the rows of its history, and the number of its system metrics."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = {"history": [], "stats": 0, "run": None}
    for block in blocks(path.read_bytes()):
        record = Record()
        record.ParseFromString(block)
        kind = record.WhichOneof("record_type")
        if kind == "run" and found["run"] is None:
            found["run"] = record.run
        elif kind == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found["history"].append(row)
        found["stats"] += kind in ("stats", "environment")
    return found
