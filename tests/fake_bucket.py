"""A bucket for tests: serves a folder as Cloud Storage's JSON API does, as far as reading needs it, and counts the bytes.

Run by path it is a process of test_models_bucket.py that loads a source: fake_bucket.py SOURCE INDEX COUNT PORT.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import pathlib
import re
import sys
import threading
import urllib.parse
from collections.abc import Iterator


class Bucket(http.server.ThreadingHTTPServer):
    """`served`: bytes of objects that went out; `asked`: their names. An object that `refuse` names is forbidden."""

    daemon_threads = True

    def __init__(self, root: pathlib.Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root, self.served, self.asked, self.refuse = root, 0, set(), ""
        self.counting = threading.Lock()

    @property
    def environment(self) -> dict[str, str]:
        """For a process that is to find this bucket (any name of one)."""
        port = self.server_address[1]
        return {"TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{port}", "GOOGLE_AUTH_TOKEN_FOR_TESTING": "abc"}


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Bucket
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urllib.parse.urlparse(self.path).path
        match = re.fullmatch(r"/(?:storage|download/storage)/v1/b/[^/]+/o/([^/]+)", path)
        name = urllib.parse.unquote(match[1]) if match else ""
        file = self.server.root / name
        if self.server.refuse and self.server.refuse in name:
            return self._answer(403, b'{"error": {"code": 403, "message": "no access to this object"}}')
        if not match or not file.is_file():
            return self._answer(404, b"not found")
        data, code, headers = file.read_bytes(), 200, {}
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(found[1]), int(found[2] or len(data) - 1) + 1
            headers["Content-Range"] = f"bytes {start}-{min(stop, len(data)) - 1}/{len(data)}"
            data, code = data[start:stop], 206
        with self.server.counting:
            self.server.served += len(data)
            self.server.asked.add(name)
        self._answer(code, data, headers | {"x-goog-generation": "1"})

    def _answer(self, code: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def bucket(root: pathlib.Path) -> Iterator[Bucket]:
    server = Bucket(root)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main(source: str, index: str, count: str, port: str) -> None:
    """Load the source over all devices of `count` processes; prints fingerprint, hash and the tokenizer's files."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    import jax

    if int(count) > 1:
        jax.distributed.initialize(f"localhost:{port}", num_processes=int(count), process_id=int(index))
    from coevo_jax.config import MeshConfig, ModelConfig
    from coevo_jax.errors import UserError
    from coevo_jax.mesh import make_mesh
    from coevo_jax.models.load import load_model, tokenizer_folder
    from coevo_jax.records.fingerprint import fingerprint

    mesh = make_mesh(MeshConfig(data=1, fsdp=2 * int(count), tensor=1))
    try:
        m = load_model(ModelConfig(source=source), mesh)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    files = sorted(path.name for path in tokenizer_folder(source).iterdir())
    print(json.dumps({"fingerprint": fingerprint(m.params), "hash": m.hash, "files": files}))


if __name__ == "__main__":
    main(*sys.argv[1:])
