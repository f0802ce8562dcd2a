"""`connect`, `doctor` and `bench` against a daemon around the fake engine."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from service.cli import main
from service.cli.agents.recipes import Endpoint, recipes, with_block
from service.cli.machine.proxies import proxy_trouble
from tests.service.cli.test_cli import daemon

TO = Endpoint("http://127.0.0.1:7717", "qwen", 65_536)


def test_every_recipe_keeps_what_stands_in_the_file_and_is_written_once() -> None:
    for name, recipe in recipes().items():
        made = recipe.merge("", TO)
        assert recipe.merge(made, TO) == made, name
        for words in ("127.0.0.1:7717", "qwen" if name != "codex" else "wire_api"):
            assert words in made, (name, words)
    found = recipes()["claude"].merge('{"env": {"A": "1"}, "theme": "dark"}', TO)
    claude = json.loads(found)
    assert (claude["theme"], claude["env"]["A"]) == ("dark", "1")
    assert claude["env"]["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:7717"
    assert claude["env"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    codex = tomllib.loads(recipes()["codex"].merge('model = "mine"\n[features]\nx = 1\n', TO))
    assert (codex["model"], codex["features"], "profiles" in codex) == ("mine", {"x": 1}, False)
    provider = codex["model_providers"]["batchengine"]
    assert (provider["wire_api"], provider["stream_idle_timeout_ms"]) == ("responses", 1_800_000)
    openclaw = json.loads(recipes()["openclaw"].merge("", TO))
    rows = openclaw["models"]["providers"]["batchengine"]["models"]
    assert [row["id"] for row in rows] == ["qwen", "qwen:background"]
    kilo, opencode = (json.loads(recipes()[name].merge("", TO)) for name in ("kilo", "opencode"))
    assert kilo == opencode | {"$schema": "https://app.kilo.ai/config.json"}
    assert recipes()["kilo"].path.endswith("/kilo/kilo.json")
    qwen = json.loads(recipes()["qwen"].merge('{"security": {"auth": {"a": 1}}}', TO))
    assert qwen["security"]["auth"] == {
        "a": 1,
        "selectedType": "openai",
        "baseUrl": "http://127.0.0.1:7717/v1",
        "apiKey": "local",
    }
    assert qwen["model"]["generationConfig"]["contextWindowSize"] == 65_536
    assert with_block(with_block("a: 1\n", "b: 2"), "c: 3").count("batchengine: begin") == 1


def test_connect_shows_writes_and_leaves_what_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.json"
    with daemon(tmp_path) as running:
        assert main.run(["connect", "codex", "--url", running.url]) == 0
        said = capsys.readouterr().out
        assert "it needs 32,768 tokens of context: serve another model" in said
        start = said.rpartition("start   ")[2].splitlines()[0]
        assert start.startswith("BATCHENGINE_API_KEY=local codex -c model_provider=batchengine")
        assert "{" not in start
        given = ["connect", "claude", "--file", str(file), "--url", running.url]
        assert main.run(given) == 0
        assert "would be" in capsys.readouterr().out
        assert not file.exists()
        file.write_text('{"theme": "dark"}')
        assert main.run([*given, "--write", "--yes"]) == 0
        assert '+    "ANTHROPIC_BASE_URL"' in capsys.readouterr().out
        assert json.loads(file.read_text())["theme"] == "dark"
        assert file.stat().st_mode & 0o777 == 0o600
        kept = tmp_path / "settings.json.before-batchengine"
        assert kept.read_text() == '{"theme": "dark"}'
        assert main.run([*given, "--write", "--yes"]) == 0
        assert "already" in capsys.readouterr().out
        file.write_text("{ // a comment\n}")
        assert main.run([*given, "--write", "--yes"]) == 2
        assert "BE1141" in capsys.readouterr().err
        assert file.read_text() == "{ // a comment\n}"
        assert main.run(["doctor", "--admin-socket", running.admin, "--json"]) in (0, 1)
        found = json.loads(capsys.readouterr().out)["findings"]
        assert any(one["about"] == "daemon" and one["state"] == "ok" for one in found)
        main.run(["drain", "--admin-socket", running.admin, "--timeout", "0"])
        capsys.readouterr()
        main.run(["doctor", "--admin-socket", running.admin])
        assert "takes no new sessions. Fix: batchengine drain --undo" in capsys.readouterr().out
        assert main.run(["drain", "--admin-socket", running.admin, "--undo"]) == 0
        capsys.readouterr()
        assert main.run(["bench", "--url", running.url, "--streams", "2", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert [row["streams"] for row in rows] == [1, 2]
        assert all(isinstance(value, int | float) for row in rows for value in row.values())
        assert main.run(["bench", "--url", running.url, "--streams", "2"]) == 0
        assert "first token ms" in capsys.readouterr().out


def test_proxies_of_the_environment_keep_only_clients_from_the_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon(tmp_path) as running:
        monkeypatch.setenv("http_proxy", "http://me:secret@127.0.0.1:9")
        monkeypatch.setenv("no_proxy", "intranet")
        assert main.run(["connect", "codex", "--url", running.url]) == 0
        said = capsys.readouterr().out
        fix = "no_proxy=intranet,127.0.0.1,localhost,::1 NO_PROXY=intranet,127.0.0.1,localhost,::1"
        assert "http_proxy is set, without 127.0.0.1 in no_proxy" in said
        assert f"Fix: export {fix}" in said
        assert "secret" not in said
        main.run(["doctor", "--admin-socket", running.admin])
        assert "warning  machine http_proxy is set" in capsys.readouterr().out
        monkeypatch.setenv("no_proxy", "intranet,127.0.0.1")
        assert main.run(["connect", "codex", "--url", running.url]) == 0
        assert "http_proxy" not in capsys.readouterr().out
    assert proxy_trouble("http://127.0.0.1:7717") is None
    monkeypatch.delenv("no_proxy")
    monkeypatch.delenv("http_proxy")
    assert proxy_trouble("http://127.0.0.1:7717") is None
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    found = proxy_trouble("http://[::1]:7717")
    assert found is not None
    assert found[0].startswith("ALL_PROXY is set, without ::1")
