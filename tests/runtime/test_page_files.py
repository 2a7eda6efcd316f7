"""The page's files as they are sent: nothing from elsewhere, nothing inline, nothing that parses text as HTML."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from duovolt.runtime.proxy.page import page_routes

FOLDER = Path(__file__).parents[2] / "runtime" / "proxy" / "page"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".html", ".css", ".js", ".svg"))
OURS = {"http://www.w3.org/2000/svg"}  # the name of a language, never fetched


def test_every_file_has_a_path_a_kind_and_the_policy() -> None:
    from starlette.applications import Starlette

    client = TestClient(Starlette(routes=list(page_routes())))
    assert len(page_routes()) == len(FILES)
    for path in FILES:
        answer = client.get("/" if path.name == "index.html" else f"/page/{path.name}")
        assert answer.status_code == 200 and answer.content == path.read_bytes()
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy
        assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = client.get(answer.url.path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert client.get("/page/__init__.py").status_code == 404
    assert client.get("/page/../page/style.css%00").status_code == 404


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_fetches_from_elsewhere_or_makes_html_of_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[\w./-]+", text)) <= OURS
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "@import"):
        assert word not in text
    if path.suffix == ".html":
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", text)


def test_modules_import_what_is_there() -> None:
    names = {path.name for path in FILES}
    for path in FILES:
        for found in re.findall(r"""(?:from|src|href)[= ]["'](?:\./|/page/)([\w.]+)["']""", path.read_text()):
            assert found in names, (path.name, found)
