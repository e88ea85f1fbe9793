"""The page's routes: static, strict, and knowing nothing."""

from __future__ import annotations

import re

import pytest

from service import ui
from tests.service.conftest import Door
from vtoken.config import LIVE_FIELDS, VTokenConfig


@pytest.fixture
def page(door: Door) -> Door:
    ui.attach(door.app)
    return door


FILES = ["", "/index.html", "/app.js", "/map.js", "/charts.js", "/policy.js", "/style.css"]


@pytest.mark.parametrize("path", [*FILES, "/fields"])
def test_page_is_public_and_may_load_only_itself(page, path):
    """No key is needed; the security policy admits no other origin and no inline code."""
    answer = page.send("GET", "/vtoken/ui" + path, key=None)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_every_reference_of_the_page_exists(page):
    """Styles, scripts and the modules that they import, with their types."""
    html = page.send("GET", "/vtoken/ui", key=None).text
    todo = re.findall(r'(?:src|href)="ui/([^"]+)"', html)
    assert {"app.js", "style.css"} <= set(todo)
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        answer = page.send("GET", f"/vtoken/ui/{name}", key=None)
        assert answer.status_code == 200, name
        kind = "text/javascript" if name.endswith(".js") else "text/css"
        assert answer.headers["content-type"].startswith(kind)
        todo += re.findall(r'from "\./([^"]+)"', answer.text)
    assert seen == {*ui._static_files()} - {"index.html"}


def test_nothing_comes_from_elsewhere(page):
    """No address of another server in any file, SVG's namespace excepted."""
    for name, (content, _) in ui._static_files().items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"https?:|url\(|src=\"(?!ui/)", text) == [], name


def test_unchanged_files_are_not_sent_again(page):
    """Asked for again with its ETag, a file is 304 without content."""
    first = page.send("GET", "/vtoken/ui/app.js", key=None)
    again = page.send(
        "GET", "/vtoken/ui/app.js", key=None, headers={"If-None-Match": first.headers["etag"]}
    )
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]


@pytest.mark.parametrize("path", ["/nothing.js", "/..%2Fui.py", "/__init__.py", "/a/b"])
def test_other_files_do_not_exist(page, path):
    """Names are looked up in a list, never on the disk."""
    assert page.send("GET", "/vtoken/ui" + path, key=None).status_code == 404


def test_fields_are_the_live_settings(page):
    """In the order of the configuration, each with a help text and the choices it has."""
    fields = page.send("GET", "/vtoken/ui/fields", key=None).json()["fields"]
    order = [name for name in VTokenConfig().to_dict() if name in LIVE_FIELDS]
    assert [field["name"] for field in fields] == order
    by_name = {field["name"]: field for field in fields}
    assert by_name["mode"]["choices"] == ["naive", "lazy"]
    assert by_name["theta_f"]["kind"] == "number"
    assert by_name["budget_tokens"]["kind"] == "integer"
    assert by_name["policy_args"]["kind"] == "object"
    assert by_name["relocate_shared"]["kind"] == "boolean"
    assert by_name["policy"] == {
        "name": "policy",
        "kind": "text",
        "choices": [],
        "help": "Name of the eviction policy in the registry; none never evicts.",
    }
    assert all(field["help"] for field in fields)
