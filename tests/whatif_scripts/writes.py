"""Write, move, list and remove files, before everything is held and after it."""

import glob
import mmap
import os
import shutil
import sqlite3
import sys
import tempfile

from numbers_of import hold  # the test's stand-in for torch

log = open("log.txt", "a")
log.write("before\n")
raw = os.open("raw.bin", os.O_RDWR | os.O_CREAT)
os.write(raw, b"before")
mapped = mmap.mmap(raw, 6)
if "start" not in sys.argv:
    assert open("log.txt").read() in ("", "before\n")
    hold()
log.write("after\n")
log.flush()
assert open("log.txt").read().endswith("before\nafter\n")
os.write(raw, b" and after")
mapped[:3] = b"AFT"
assert os.pread(raw, 20, 0) == open("raw.bin", "rb").read() == b"AFTore and after"
os.close(raw)

with open("new.txt", "w") as file:
    file.write("new")
with open("user.txt", "r+") as file:
    file.write("NEW")
assert open("user.txt").read() == "NEWr's own"
assert sorted(glob.glob("*.txt")) == ["log.txt", "new.txt", "old.txt", "user.txt"]
assert {"new.txt", "old.txt"} <= set(os.listdir()) == {each.name for each in os.scandir()}
kept = glob.glob("old*")
while kept:  # ends, though the user's file stays
    os.remove("old.txt")
    kept = glob.glob("old*")
assert not os.path.exists("old.txt") and not os.access("old.txt", os.R_OK)
try:
    open("old.txt")
    raise SystemExit("it is still there")
except FileNotFoundError:
    pass
os.replace("new.txt", "old.txt")
assert open("old.txt").read() == "new" and not os.path.exists("new.txt")
os.chmod("old.txt", 0o600)
os.symlink("old.txt", "link.txt")
assert open("link.txt").read() == "new"
with tempfile.NamedTemporaryFile("w", dir=".") as file:
    file.write("x")
os.makedirs("made/deep")
open("made/deep/file", "w").close()
os.rename("made", "moved")
assert os.listdir("moved/deep") == ["file"]
shutil.rmtree("folder")
assert not os.path.exists("folder/inner.txt") and "folder" not in os.listdir()
database = sqlite3.connect("base.db")
database.execute("create table one (x)")
database.commit()
assert os.path.exists("base.db") and sqlite3.connect(":memory:").execute("select 1").fetchone()
try:
    open("none/at all.txt", "w")
    raise SystemExit("its folder is not there")
except FileNotFoundError:
    pass
with open("/dev/null", "w") as file:
    file.write("free")
print("all as it should be")
