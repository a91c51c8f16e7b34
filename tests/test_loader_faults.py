"""Files that loaders must read or name: real faulty ones, and headers that claim too much."""

import shutil

import pytest
from helpers import SRC, on_gpu, run_forked
from test_loader import FAULTY, SMALL, error_of
from test_resize import claims

each_loader = pytest.mark.parametrize("script", ["loader", "loader_DALI", on_gpu("loader_DALI")])


def is_named(done, script, path):
    """Return whether the error names `path`; it is the baseline's or DALI's."""
    line = error_of(done, script)
    assert str(path) in line or script == "loader_DALI" and "DALI" in line, line
    return str(path) in line


@pytest.mark.fault(13)
@each_loader
@pytest.mark.parametrize("width, height", [(30_000, 30_000), (2 ** 31 + 28, 28)])
def test_a_header_that_claims_too_much(script, width, height, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "set")
    bad = tmp_path / "set/train/b/bad.png"
    bad.write_bytes(claims(width, height))
    for _ in range(4 if script == "loader_DALI" else 1):  # DALI's threads could crash at times
        done = run_forked(SRC / f"{script}.py", "--data_source", tmp_path / "set", *SMALL,
                          "--epochs", 1, "--num_workers", 1, "--result_dir", tmp_path / "r")
        is_named(done, script, bad)


@pytest.mark.skipif(not FAULTY.exists(), reason="needs the pictures of ../shared/data/faulty")
@pytest.mark.fault(2, 7, 9, 11, 12, 14)
@each_loader
def test_real_faulty_files_are_read_or_refused(script, photos, tmp_path):
    """DALI passes over a PNG's texts, so it reads a text bomb."""
    shutil.copytree(photos, tmp_path / "set")
    refused, read = set(), set()
    for file in sorted(FAULTY.iterdir()):
        if file.suffix not in (".png", ".jpg", ".JPEG"):
            continue
        odd = tmp_path / "set/train/b" / file.name
        shutil.copy(file, odd)
        done = run_forked(SRC / f"{script}.py", "--data_source", tmp_path / "set", *SMALL,
                          "--epochs", 1, "--num_workers", 1, "--result_dir", tmp_path / "r")
        assert "Warning" not in done.stderr, done.stderr
        if done.returncode:
            is_named(done, script, odd)
        (refused if done.returncode else read).add(file.name)
        odd.unlink()
    assert {"truncated_image.png", "broken.png"} <= refused
    assert "truncated_jpeg.jpg" in refused or script == "loader_DALI"  # a GPU's decoder reads it
    assert ("png_decompression_dos.png" in refused) == (script == "loader")
    assert {"n02951585_can_opener.JPEG", "pil_sample_cmyk.jpg", "hopper_bad_exif.jpg",
            "hopper_orientation_6.jpg", "pil123rgba.png"} <= read
