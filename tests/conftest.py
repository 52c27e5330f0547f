"""Eight fake CPU devices and strict JAX flags, set before JAX is imported (design.md 6)."""

import contextlib
import gc
import os
import pathlib
import resource
import signal
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
if "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

REPO = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """The real data folder beside the checkout; skips where it is absent (COEVO_SHARED moves it)."""
    folder = pathlib.Path(os.environ.get("COEVO_SHARED", REPO.parent / "shared")) / "data"
    if not folder.is_dir():
        pytest.skip(f"real data folder {folder} is absent")
    return folder


@pytest.fixture
def file_size_limit():
    """`with file_size_limit(bytes)`: the kernel refuses longer files (EFBIG), which stands in for a full disk.

    The limit holds for the whole process, pytest's own output included where that goes to a file: keep the block small, and
    never let it reach over the end of a test, where pytest prints.
    """

    @contextlib.contextmanager
    def limit(size: int):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)

    return limit


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_end_with_their_module():
    """Give back compiled programs: each takes memory mappings, of which a process may have 65,530 (then it crashes)."""
    yield
    if (support := sys.modules.get("sampler_support")) is not None:
        support.engine_of.cache_clear()
    jax.clear_caches()
    gc.collect()
