"""Configuration: derived defaults, bounds, and errors that name file, key, line and fix."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from batchengine.config import (
    Config,
    Machine,
    StoreConfig,
    disk_bytes,
    disk_warnings,
    limit_warnings,
    load,
    openness,
    warnings,
)
from batchengine.config.loading import is_loopback
from batchengine.config.peers import read_peer_file
from batchengine.core import BatchEngineError, SlaClass
from kv_store.pages.maintenance import SESSIONS_MAX
from service.http.access import key_lines

KEY = "0123456789abcdef"


@pytest.fixture
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    home = tmp_path_factory.mktemp("home")  # short enough for a socket in it
    return Machine((0, 2, 4, 6), 64 << 30, False, {}, str(home))


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "batchengine.toml"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def message(tmp_path: Path, text: str) -> str:
    with pytest.raises(BatchEngineError) as caught:
        load(write(tmp_path, text))
    return str(caught.value)


def test_defaults_are_derived_from_the_machine(machine: Machine) -> None:
    config = load(machine=machine, overrides={"model.path": "/models/Pocket-Q4_0.gguf"})
    assert config.model.id == "pocket-q4_0"
    assert (config.server.host, config.server.port) == ("127.0.0.1", 7717)
    (lane,) = config.lanes
    assert (lane.name, lane.kind, lane.threads, lane.cores) == ("cpu", "cpu", 4, (0, 2, 4, 6))
    assert config.store.dir == f"{machine.home}/.local/state/batchengine/kv"
    assert config.server.admin_socket == f"{machine.home}/.local/state/batchengine/admin.sock"
    assert config.cache_dir == f"{machine.home}/.cache/batchengine"
    assert 64 << 20 <= config.store.budget_bytes <= 32 << 30


def test_directories_are_taken_from_systemd_then_root_then_xdg(machine: Machine) -> None:
    env = {
        "STATE_DIRECTORY": "/s/a:/s/b",
        "CACHE_DIRECTORY": "/c",
        "RUNTIME_DIRECTORY": "/r",
        "XDG_STATE_HOME": "/x",
    }
    facts = {"cores": (0,), "memory_bytes": 1 << 30, "home": "/home/a"}
    config = load(machine=Machine(is_root=True, env=env, **facts))
    assert (config.store.dir, config.cache_dir) == ("/s/a/kv", "/c")
    assert config.server.admin_socket == "/r/admin.sock"
    config = load(machine=Machine(is_root=True, env={}, **facts))
    assert (config.store.dir, config.cache_dir) == (
        "/var/lib/batchengine/kv",
        "/var/cache/batchengine",
    )
    assert config.server.admin_socket == "/run/batchengine/admin.sock"
    xdg = {"XDG_STATE_HOME": "/x", "XDG_RUNTIME_DIR": "/run/user/7"}
    config = load(machine=Machine(is_root=False, env=xdg, **facts))
    assert config.store.dir == "/x/batchengine/kv"
    assert config.server.admin_socket == "/run/user/7/batchengine/admin.sock"
    relative = {"XDG_STATE_HOME": "x", "XDG_CACHE_HOME": ".", "XDG_RUNTIME_DIR": "run"}
    config = load(machine=Machine(is_root=False, env=relative, **facts))
    assert config.store.dir == "/home/a/.local/state/batchengine/kv"
    assert config.server.admin_socket == "/home/a/.local/state/batchengine/admin.sock"
    assert config.cache_dir == "/home/a/.cache/batchengine"


def test_the_machine_has_cores_inside_the_affinity_mask_only() -> None:
    import os

    here = Machine.here()
    assert here.cores
    assert set(here.cores) <= os.sched_getaffinity(0)


def test_every_setting_of_a_file_is_read(tmp_path: Path, machine: Machine) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    (tmp_path / "key").chmod(0o600)
    text = f"""
debug = true
cache_dir = "cache"
[model]
path = "m.gguf"
aliases = ["qwen", "default"]
[server]
host = "0.0.0.0"
tls_terminated = true
port = 8123
[auth.keys.heartbeat]
key_file = "key"
class = "background"
[auth.keys.me]
key = "{KEY}2"
[[lane]]
threads = 2
[[lane]]
cores = [4, 6]
entries_max = 16
[store]
durability = "power"
free_floor_bytes = 1_000_000
sessions_max = 50
[sla]
default_class = "interactive"
[sla.batch]
ttft_ms = 600000
"""
    config = load(write(tmp_path, text), machine=machine)
    assert config.debug
    assert config.cache_dir == str(tmp_path / "cache")
    assert config.model.path == str(tmp_path / "m.gguf")
    assert config.model.aliases == ("qwen", "default")
    assert [(k.name, k.key, k.sla_class) for k in config.auth] == [
        ("heartbeat", KEY, SlaClass.BACKGROUND),
        ("me", KEY + "2", None),
    ]
    assert [(n.name, n.threads, n.cores) for n in config.lanes] == [
        ("cpu", 2, (0, 2)),
        ("cpu1", 2, (4, 6)),
    ]
    assert (config.store.free_floor_bytes, config.store.sessions_max) == (1_000_000, 50)
    assert StoreConfig().sessions_max == SESSIONS_MAX, "one default, told twice"
    assert config.sla.default_class is SlaClass.INTERACTIVE
    assert config.sla.of(SlaClass.BATCH).ttft_ms == 600_000
    assert config.sla.of(SlaClass.BATCH).tpot_ms == 2000
    assert KEY not in repr(config)


def test_a_user_without_a_home_must_set_the_folders(tmp_path: Path) -> None:
    homeless = Machine((0,), 64 << 30, False, {}, "")
    with pytest.raises(BatchEngineError, match="no home directory") as caught:
        load(None, {"store.dir": str(tmp_path)}, homeless)
    assert caught.value.code == "BE1107"
    slots = {"store.dir": "s", "server.admin_socket": "a", "cache_dir": "c"}
    assert load(None, slots, homeless).store.dir == "s"
    for name in ("STATE_DIRECTORY", "CACHE_DIRECTORY"):
        homeless.env[name] = str(tmp_path / name.lower())  # type: ignore[index]
    assert load(None, {}, homeless).server.admin_socket == f"{tmp_path}/state_directory/admin.sock"


def test_settings_that_exceed_the_disk_are_reported(tmp_path: Path) -> None:
    where = {"store.dir": str(tmp_path), "server.admin_socket": "a"}
    assert disk_warnings(load(None, where | {"store.free_floor_bytes": 1})) == []
    (sent,) = disk_warnings(load(None, where | {"store.free_floor_bytes": 1 << 50}))
    assert f"the disk of {tmp_path} has" in sent
    assert "1,073,741,824 MiB must stay free" in sent
    assert "set store.free_floor_bytes" in sent


def test_free_space_is_found_for_paths_that_do_not_exist(tmp_path: Path) -> None:
    whole = disk_bytes(str(tmp_path))
    assert whole
    blocked = tmp_path / "file"
    blocked.write_text("")
    for path in (tmp_path / "new" / "kv", blocked / "kv", tmp_path / ("x" * 5000)):
        found = disk_bytes(str(path))
        assert found is not None, path
        assert abs(found[0] - whole[0]) < 1 << 30
        load(None, {"store.dir": str(path), "server.admin_socket": "a"})


def test_overrides_take_precedence_and_none_is_ignored(tmp_path: Path, machine: Machine) -> None:
    path = write(tmp_path, "[server]\nport = 1\n[[lane]]\nthreads = 1\n")
    given = {"server.port": 2, "lane.threads": 3, "server.host": None, "debug": True}
    config = load(path, given, machine)
    assert (config.server.port, config.server.host, config.debug) == (2, "127.0.0.1", True)
    assert config.lanes[0].threads == 3


def test_the_error_of_an_unknown_key_names_file_line_and_the_nearest_key(tmp_path: Path) -> None:
    text = message(tmp_path, "[server]\nport = 1\n[[lane]]\nthreads = 1\n\nentries = 4\n")
    path = tmp_path / "batchengine.toml"
    assert (
        text == f"BE1102 unknown key lane.entries in {path} line 6. Did you mean lane.entries_max?"
    )


def test_router_and_lane_keys_are_read(tmp_path: Path, machine: Machine) -> None:
    text = """
[router]
promote_auto = false
demote_idle_s = 30
long_prompt_tokens = 512
[[lane]]
tier = "fast"
pool = "quick"
queue_max = 8
[[lane]]
[[lane]]
"""
    config = load(write(tmp_path, text), machine=machine)
    router = config.router
    assert (router.promote_auto, router.demote_idle_s, router.long_prompt_tokens) == (
        False,
        30.0,
        512,
    )
    assert [(n.name, n.tier, n.pool, n.queue_max) for n in config.lanes] == [
        ("cpu", "fast", "quick", 8),
        ("cpu1", "bulk", "", 0),
        ("cpu2", "bulk", "", 0),
    ]
    assert [c.patience_s for c in (config.sla.standard, config.sla.batch)] == [300.0, 0.0]


@pytest.mark.parametrize(
    ("text", "cores", "tiers"),
    [
        ("[[lane]]", [(0, 2, 4, 6)], ["any"]),
        ("[[lane]]\n[[lane]]", [(0, 2), (4, 6)], ["any", "any"]),
        ("[[lane]]\nthreads=1\n[[lane]]", [(0,), (2, 4, 6)], ["any", "any"]),
        ("[[lane]]\n[[lane]]\ncores=[0]\ntier='bulk'", [(2, 4, 6), (0,)], ["any", "bulk"]),
        ("[[lane]]\nthreads=4\n[[lane]]", [(0, 2, 4, 6)] * 2, ["any", "any"]),
        ("[[lane]]\n" * 5, [(0, 2, 4, 6)] * 5, ["any"] * 5),
    ],
)
def test_lanes_divide_the_cores(
    text: str, cores: list[tuple[int, ...]], tiers: list[str], tmp_path: Path, machine: Machine
) -> None:
    config = load(write(tmp_path, text), machine=machine)
    assert [lane.cores for lane in config.lanes] == cores
    assert [lane.tier for lane in config.lanes] == tiers
    found = " ".join(warnings(config))
    assert ("share the cores" in found) == (
        len({c for n in cores for c in n}) < sum(map(len, cores))
    )


def test_a_derived_lane_name_differs_from_every_given_one(tmp_path: Path, machine: Machine) -> None:
    config = load(write(tmp_path, "[[lane]]\nname='cpu1'\n[[lane]]"), machine=machine)
    assert [lane.name for lane in config.lanes] == ["cpu1", "cpu2"]


def test_a_tier_without_lanes_is_reported(tmp_path: Path, machine: Machine) -> None:
    config = load(write(tmp_path, "[[lane]]\ntier='bulk'\n" * 2), machine=machine)
    assert any("no lane has tier fast" in text for text in warnings(config))
    config = load(write(tmp_path, "[[lane]]\ntier='fast'\n[[lane]]"), machine=machine)
    assert warnings(config) == []


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (
            "[server]\n\nport = 70000",
            "BE1104",
            "server.port = 70000 is out of bounds|line 3|65,535",
        ),
        ("[server]\nport = -1", "BE1104", "server.port|line 2"),
        ("[server]\nport = true", "BE1103", "must be a whole number, not true or false"),
        ("[server]\nport = 1.5", "BE1103", "must be a whole number, not 1.5"),
        ("[server]\nkeepalive_s = nan", "BE1104", "server.keepalive_s"),
        ("server = 3", "BE1103", "server must be a table, not a whole number|line 1"),
        ("server.prot = 3", "BE1102", "server.prot|line 1|Did you mean server.port?"),
        ("[sever]\nport = 3", "BE1102", "sever|line 1|Did you mean server?"),
        ("[server]\nallowed_hosts = 'x'", "BE1103", "must be a list"),
        ("[server]\nallowed_hosts = [1]", "BE1103", "must be text"),
        ("[store]\ndurability = 'powr'", "BE1105", "did you mean power?"),
        ("[store]\nfree_floor_bytes = -1", "BE1104", "store.free_floor_bytes|line 2"),
        ("[store]\nsessions_max = 0", "BE1104", "store.sessions_max|line 2"),
        ("[[lane]]\nkind = 'gpu'", "BE1105", "lane.kind"),
        ("[lane]\nkind = 'cpu'", "BE1103", "[[lane]]"),
        ("[[lane]]\n[[lane]]\nthreads = -2", "BE1104", "lane.threads|line 3"),
        ("[[lane]]\nentries_max = 700", "BE1107", "tokens_per_step|at least 716"),
        ("[[lane]]\ncores = [1, 1]", "BE1107", "names a core twice"),
        ("[[lane]]\ncores = [1]\nthreads = 2", "BE1107", "one core per thread"),
        ("[[lane]]\nname = 'a'\n[[lane]]\nname = 'a'", "BE1107", "name of another lane"),
        ("[[lane]]\ntier = 'quick'", "BE1105", "lane.tier|line 2|fast, bulk, any"),
        (
            "[[lane]]\npool='a'\ntier='fast'\n[[lane]]\npool='a'\ntier='bulk'",
            "BE1107",
            "lane.pool|line 5|tier fast and of tier bulk",
        ),
        ("[[lane]]\npool = 'a\tb'", "BE1107", "lane.pool|line 2|printable"),
        ("[router]\ndwell_s = 90", "BE1107", "router.dwell_s|line 2|demote_idle_s = 60"),
        ("[router]\npromote = true", "BE1102", "Did you mean router.promote_auto?"),
        ("[router]\ntolerance = -1", "BE1104", "router.tolerance|line 2"),
        ("[sla.batch]\npatience_s = -1", "BE1104", "sla.batch.patience_s"),
        ("[sla.batch]\nttft_ms = 5", "BE1107", "sla.batch|line 1|background"),
        ("[sla]\ndefault_class = 'fast'", "BE1105", "interactive, standard"),
        ("[server]\nhost = '0.0.0.0'", "BE1106", "server.host|line 2|auth.keys|TLS"),
        ("[auth.keys.a]\nkey = 'short'", "BE1108", "auth.keys.a|line 1|openssl"),
        (
            "[auth.keys.a]\nkey_file = '/no/such'",
            "BE1108",
            "/no/such cannot be read: no such file or directory|line 2",
        ),
        (f"[auth.keys.a]\nkey='{KEY}'\n[auth.keys.b]\nkey='{KEY}'", "BE1108", "two names"),
        ("[auth]\ntoken = 'x'", "BE1102", "auth.token"),
        ("[server]\nadmin_socket = '/" + "x" * 120 + "'", "BE1107", "107 bytes"),
        ("[model]\npath = 'a\\u0000b'", "BE1103", ""),
        ("port = = 3", "BE1101", "is not TOML|line 1"),
    ],
)
def test_errors_name_the_key_and_a_fix(tmp_path: Path, text: str, code: str, words: str) -> None:
    found = message(tmp_path, text.replace("'a\\u0000b'", '["a"]'))
    assert found.startswith(code), found
    for word in words.split("|"):
        assert word in found, found


def test_a_zero_byte_in_a_path_is_refused(tmp_path: Path) -> None:
    assert "zero byte" in message(tmp_path, '[model]\npath = "a\\u0000b"')


@pytest.mark.parametrize("key", ["model.path", "store.dir", "cache_dir", "server.admin_socket"])
def test_a_path_that_is_not_text_is_refused(key: str) -> None:
    with pytest.raises(BatchEngineError, match=r"BE1105 .*'/x/\\udcff' holds bytes") as error:
        load(None, {"model.id": "m", key: os.fsdecode(b"/x/\xff")})
    assert key in str(error.value)
    assert str(error.value).isprintable()


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BatchEngineError, match="BE1100 cannot read") as caught:
        load(str(tmp_path / "none.toml"))
    assert caught.value.fix == "name a TOML file that this user can read"
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BatchEngineError, match="BE1101"):
        load(str(tmp_path / "bad.toml"))


def test_an_override_is_checked_like_the_file() -> None:
    with pytest.raises(BatchEngineError, match=r"BE1104 server\.port = 99999 is out of bounds\."):
        load(overrides={"server.port": 99999})
    with pytest.raises(BatchEngineError, match=r"BE1102 unknown key server\.prt"):
        load(overrides={"server.prt": 1})


def test_lane_override_of_two_lanes_is_ambiguous(tmp_path: Path) -> None:
    with pytest.raises(BatchEngineError, match="ambiguous"):
        load(write(tmp_path, "[[lane]]\n[[lane]]\n"), {"lane.threads": 1})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[model]\nid = 'foo:batch'", "model.id = 'foo:batch' ends as NAME:CLASS"),
        ("[model]\npath = '/x/Foo:Batch.gguf'", "model.id = 'foo:batch' ends as NAME:CLASS"),
        ("[model]\nid = 'a'\naliases = ['b', 'c:interactive']", "model.aliases = 'c:interactive'"),
        ("[model]\nid = 'a\\nb'".replace("'", '"'), "is no name that a request can have"),
        (f"[model]\npath = '/x/{'y' * 245}.gguf'", "is no name that a request can have"),
        ("[model]\nid = 'a'\naliases = ['']", "model.aliases has '', no name"),
        ("[model]\nid = 'a'\naliases = ['b', 'b']", "has 'b', which is a name already"),
        ("[model]\nid = 'a'\naliases = ['a']", "has 'a', which is a name already"),
        ("[server]\nallowed_origins = ['localhost:3000']", "has 'localhost:3000', which is the"),
        ("[server]\nallowed_origins = ['*']", "has '*', which is the origin of no page"),
        ("[server]\nallowed_origins = ['https://*.a.example']", "the origin of no page"),
        ("[server]\nallowed_origins = ['https://a.example/x']", "the origin of no page"),
        ("[server]\nallowed_hosts = ['http://a.example/']", "the host of no request"),
        (
            "[server]\nallowed_hosts = ['a.example', '*']",
            "has '*', which is the host of no request",
        ),
        ("[server]\nallowed_hosts = ['*.a.example']", "the host of no request"),
        ("[[lane]]\n[[lane]]\nname = 'GPU'", "lane.name = 'GPU' is no name of a lane"),
        ("[[lane]]\nname = 'a b'", "lane.name = 'a b' is no name of a lane"),
    ],
)
def test_names_that_mean_something_else_or_nothing_are_refused(
    tmp_path: Path, text: str, why: str
) -> None:
    found = message(tmp_path, text)
    assert why in found
    assert "line" in found or "path" in text
    assert "Fix:" in found


def test_names_with_a_colon_and_the_origins_of_pages_are_allowed(tmp_path: Path) -> None:
    origins = ["https://a.example/", "http://[::1]:3000", "app://obsidian.md", "null"]
    text = f"[model]\nid = 'qwen3:8b'\naliases = ['a:b']\n[server]\nallowed_origins = {origins}"
    assert load(write(tmp_path, text)).server.allowed_origins == tuple(origins)


def test_hosts_that_a_header_can_have_are_allowed(tmp_path: Path) -> None:
    hosts = ["a.example", "a.example:7717", "[::1]", "::1", "10.0.0.2:80", "my_host"]
    found = load(write(tmp_path, f"[server]\nallowed_hosts = {hosts}")).server.allowed_hosts
    assert found == tuple(hosts)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("192.168.1.4", False),
        ("localhost.example", False),
    ],
)
def test_loopback_addresses_are_recognised(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_has_one_pair_of_brackets_in_urls(tmp_path: Path, host: str) -> None:
    server = load(write(tmp_path, f"[server]\nhost='{host}'\nport=80")).server
    assert (server.host, server.address) == ("::1", "[::1]:80")


def test_a_non_local_host_with_a_key_is_allowed(tmp_path: Path) -> None:
    path = write(
        tmp_path, f"[server]\nhost='0.0.0.0'\ntls_terminated=true\n[auth.keys.a]\nkey='{KEY}'"
    )
    config = load(path)
    assert warnings(config) == []


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o644])
@pytest.mark.parametrize("entry", [f"key = '{KEY}'", "key_file = 'key'"])
def test_a_key_in_a_file_that_others_can_open_is_refused(
    tmp_path: Path, entry: str, mode: int
) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    path = write(tmp_path, f"[auth.keys.a]\n{entry}")
    assert load(path).auth[0].key == KEY
    (key if "file" in entry else Path(path)).chmod(mode)
    with pytest.raises(BatchEngineError, match=f"open to other users.*{mode:04o}") as caught:
        load(path)
    assert caught.value.code == "BE1108"


def test_a_key_file_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o600)
    owner = os.stat(path).st_uid or 4242
    os.chown(path, owner, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 77)
    assert openness(str(path)) == f"it belongs to user {owner}"
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    assert openness(str(path)) == ""


def test_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Config().debug = True  # type: ignore[misc]


def test_settings_that_exclude_each_other_are_not_accepted_silently() -> None:
    power = {"store.durability": "power"}
    assert not any("full_disk" in text for text in warnings(load(overrides=power)))
    found = warnings(load(overrides={**power, "store.full_disk": "finish"}))
    assert any("full_disk = finish has no effect" in text for text in found)


def test_a_gpu_that_is_required_has_a_lane(tmp_path: Path) -> None:
    assert "no lane is on a GPU" in message(tmp_path, 'require = "gpu"\n')


def test_cores_and_threads_that_the_machine_has_not_are_refused(
    tmp_path: Path, machine: Machine
) -> None:
    machine = replace(machine, allowed=(0, 1, 2, 3, 4, 5, 6, 7, 12))
    for text, words in (
        ("[[lane]]\nthreads = 5", "lane.threads = 5|line 2|4 physical cores|1 to 4"),
        ("[[lane]]\ncores = [0, 99]", "core 99|line 2|0-7,12"),
    ):
        with pytest.raises(BatchEngineError) as caught:
            load(write(tmp_path, text), machine=machine)
        assert caught.value.code == "BE1107"
        for word in words.split("|"):
            assert word in str(caught.value)
    assert load(write(tmp_path, "[[lane]]\ncores = [1, 12]"), machine=machine).lanes[0].threads == 2


def test_sizes_may_have_units(tmp_path: Path, machine: Machine) -> None:
    for text, wanted in (
        ('"10GB"', 10**10),
        ('"10 GiB"', 10 << 30),
        ('"1.5T"', 3 << 39),
        ('"512mib"', 512 << 20),
        ('"100"', 100),
        ("7_000", 7000),
        ("0", None),
    ):
        config = load(write(tmp_path, f"[store]\nbudget_bytes = {text}"), machine=machine)
        assert config.store.budget_bytes == (wanted or config.store.budget_bytes), text
    for text in ('"ten"', '"10 XB"', '"-1GB"', '""', '"9999999999999999999999GB"'):
        assert "is no size" in message(tmp_path, f"[store]\nbudget_bytes = {text}")
    assert "out of bounds" in message(tmp_path, '[store]\nbudget_bytes = "9000TB"')


def test_a_file_that_begins_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbf[model]\nid = 'a'\n")
    assert load(str(tmp_path / "x.toml")).model.id == "a"


def test_a_key_file_that_begins_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"\xef\xbb\xbf" + KEY.encode() + b"\r\n")
    key.chmod(0o600)
    assert load(write(tmp_path, "[auth.keys.a]\nkey_file = 'key'")).auth[0].key == KEY
    assert key_lines(key) == [KEY]


def test_a_key_file_that_holds_no_single_key_is_explained(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("# of agents\n0123456789abcdef\n")
    key.chmod(0o600)
    found = message(tmp_path, f"[auth.keys.a]\nkey_file = '{key}'")
    assert "has 2 lines" in found
    assert "line 2" in found
    found = message(tmp_path, "[auth.keys.a]\nkey_file = '/run/credentials/x.service/a'")
    assert "LoadCredential=" in found


def test_a_credential_of_a_service_that_is_stopped_is_missing_where_it_is_only_looked_at(
    tmp_path: Path,
) -> None:
    name = "/run/credentials/no-such.service/a"
    path = write(
        tmp_path, f"[auth.keys.a]\nkey_file = '{name}'\n[auth.keys.b]\nkey_file = '{name}'"
    )
    os.chmod(path, 0o644)
    found = load(path, is_served=False)
    assert [len(key.key) >= 8 for key in found.auth] == [True, True]
    assert sum("LoadCredential=" in text for text in warnings(found)) == 2
    with pytest.raises(BatchEngineError, match="LoadCredential="):
        load(path)


def test_a_small_address_space_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, is_warned in ((1 << 30, True), (1 << 50, False), (-1, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        assert bool(limit_warnings(load())) is is_warned


def test_hosts_and_toml_are_explained(tmp_path: Path) -> None:
    found = message(tmp_path, "[server]\nhost = 'no such host'")
    assert "server.host = 'no such host' is no address" in found
    assert "line 2" in found
    found = message(tmp_path, "[model]\n[store]\n[model]\n")
    assert "declare model twice" in found
    assert "Fix:" in found
    assert "256" in message(tmp_path, "[limits]\ncontext_tokens = 10")


@pytest.mark.parametrize(
    ("cores", "entry", "threads"), [(2, "", 1), (8, "", 2), (64, "", 4), (64, "threads = 9", 9)]
)
def test_a_gpu_lane_has_a_share_of_the_cores(
    tmp_path: Path, cores: int, entry: str, threads: int
) -> None:
    gpu = f"[[lane]]\n[[lane]]\nkind = 'cuda'\nvram_bytes = '4GB'\n{entry}"
    machine = Machine(tuple(range(cores)), 64 << 30, False, {}, "/home/a")
    cpu, own = load(write(tmp_path, gpu), machine=machine).lanes
    assert (own.threads, cpu.threads) == (threads, cores - threads)


def test_the_rest_of_the_context_is_the_answer_where_all_lanes_hold_it(tmp_path: Path) -> None:
    assert load(write(tmp_path, "")).answer_tokens_max == 0
    assert load(write(tmp_path, "[limits]\ntokens_max_default = 9")).answer_tokens_max == 9
    gpu = "[[lane]]\n[[lane]]\nkind = 'cuda'\nvram_bytes = '4GB'"
    assert load(write(tmp_path, gpu)).answer_tokens_max == 4096


def test_a_file_of_a_peer_that_is_too_large_is_refused_with_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path, "#" * 70_000)
    with pytest.raises(BatchEngineError, match="has 70,000 bytes, more than 65,536") as caught:
        read_peer_file(Path(path), tls=True)
    assert caught.value.fix == 'write one line into it, address = "HOST:PORT", or remove it'


def test_a_file_of_a_peer_that_cannot_be_read_is_not_named_anew(tmp_path: Path) -> None:
    """Its operator has named none: it lies in a folder."""
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(BatchEngineError, match="BE1100 cannot read") as caught:
            read_peer_file(path, tls=True)
        assert caught.value.fix.startswith("let the daemon's user read it, or remove it")
