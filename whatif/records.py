"""Records: lines of JSON by which the processes of a run tell the parent what they have seen."""

import json
import os


def send(folder, **record):
    """Append a record to the run's file. Nothing happens if the run is over."""
    try:
        file = os.open(os.path.join(folder, "records"), os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:
        return
    try:
        os.write(file, (json.dumps({"pid": os.getpid(), **record}) + "\n").encode())
    finally:
        os.close(file)


class Reader:
    """Reads the records that have come since the last call."""

    def __init__(self, folder):
        self.file, self.text = open(os.path.join(folder, "records"), errors="replace"), ""

    def read(self):
        *lines, self.text = (self.text + self.file.read()).split("\n")  # the last may be cut
        return [json.loads(line) for line in lines]

    def close(self):
        self.file.close()
