"""The catalogue of errors: one row per code, with what happened, why, and how to fix it.

A row is called with the values of its templates and returns the error to raise:
`raise SESSION_BUSY(queued=n)`. A code has one meaning and one row; a new meaning takes a new code.
The hundreds of a code give its area: 11 configuration and command line, 12 engine, 13 model file,
15 text, 16 store, 17 HTTP, 21 frames, 22 worker, 23 computation, 24 sessions, 25 peers, 30 moves.
A protocol maps `kind`, `name` and `param` to its own error object; rows are independent of HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from batchengine.core import BatchEngineError, Kind


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of the catalogue. `what`, `why` and `fix` are `str.format` templates.

    A template that is `{why}` or `{fix}` alone may be left out of a call: it is empty then.
    `param` and `retry_ms` are defaults that a call may replace; values named in `details` also
    become fields of the error object.
    """

    code: str
    kind: Kind
    name: str
    what: str
    why: str = ""
    fix: str = ""
    param: str | None = None
    retry_ms: int | None = None
    details: tuple[str, ...] = ()

    def __call__(
        self, *, param: str | None = None, retry_ms: int | None = None, **values: object
    ) -> BatchEngineError:
        filled = {"why": "", "fix": "", "param": param, **values}
        return BatchEngineError(
            self.code,
            self.kind,
            self.name,
            self.what.format_map(filled),
            self.why.format_map(filled),
            self.fix.format_map(filled),
            param=self.param if param is None else param,
            retry_ms=self.retry_ms if retry_ms is None else retry_ms,
            details={name: cast("int | str", values[name]) for name in self.details},
        )


_USAGE = "invalid_configuration"
_DEFECT = "internal_error"
_NEW_FILE = "use an intact GGUF file (download or convert it again)"

# fmt: off
# ------------------------------------------------- 11: configuration, command line, its client
CONFIG_UNREADABLE = Problem("BE1100", Kind.INVALID, _USAGE,
    "cannot read {path}", "{why}", "{fix}")
CONFIG_NOT_TOML = Problem("BE1101", Kind.INVALID, _USAGE,
    "{path} is not TOML", "{why}", "{fix}")
CONFIG_UNKNOWN_KEY = Problem("BE1102", Kind.INVALID, _USAGE, "unknown key {key}{where}. {hint}")
CONFIG_TYPE = Problem("BE1103", Kind.INVALID, _USAGE, "{what}", fix="{fix}")
CONFIG_BOUNDS = Problem("BE1104", Kind.INVALID, _USAGE, "{what}", fix="{fix}")
CONFIG_CHOICE = Problem("BE1105", Kind.INVALID, _USAGE, "{what}", fix="{fix}")
CONFIG_EXPOSED = Problem("BE1106", Kind.INVALID, _USAGE, "{what}", fix="{fix}")
CONFIG_CONTRADICTION = Problem("BE1107", Kind.INVALID, _USAGE, "{what}", fix="{fix}")
CONFIG_KEYS = Problem("BE1108", Kind.INVALID, _USAGE, "{what}", fix="{fix}")
CANNOT_LISTEN = Problem("BE1110", Kind.INTERNAL, _DEFECT,
    "cannot listen on {host}:{port}", "{why}", "{fix}")
HOST_EXPOSED = Problem("BE1111", Kind.INVALID, _USAGE,
    "refusing to listen on {host}, which other machines can reach",
    "prompts and keys would cross the network in the open",
    "listen on 127.0.0.1, or add a TLS proxy in front: server.tls_terminated = true says that there"
    " is one")
API_KEY_FILE = Problem("BE1112", Kind.INVALID, _USAGE,
    "the API key file {path} {problem}", "{why}", "{fix}")
ADMIN_SOCKET = Problem("BE1113", Kind.INTERNAL, _DEFECT,
    "cannot open the admin socket {path}",
    "{why}",
    "name another path with --admin-socket; if another daemon has it, stop that one or give this"
    " one a name: serve --instance NAME has a socket, a store and a port of its own")
NO_C_PARSER = Problem("BE1114", Kind.INTERNAL, _DEFECT,
    "aiohttp runs without its C parser",
    fix="reinstall aiohttp from a wheel, and unset AIOHTTP_NO_EXTENSIONS")
NO_MODEL = Problem("BE1115", Kind.INVALID, _USAGE,
    "no model to serve",
    fix="batchengine serve MODEL.gguf, or set model.path in the configuration")
NO_MODEL_FILE = Problem("BE1116", Kind.INVALID, _USAGE,
    "there is no model file {path!s:.200}", "{why}", "{fix}")
LANE_COUNT = Problem("BE1117", Kind.INVALID, _USAGE,
    "--lanes {count} is out of bounds",
    fix="1 to {most}; more need [[lane]] tables in a configuration file")
NODE_COUNT = Problem("BE1118", Kind.INVALID, _USAGE,
    "--nodes {count} is out of bounds",
    fix="{least} to {most}; more hosts are linked with `batchengine peers`")
TOO_LITTLE_MEMORY = Problem("BE1119", Kind.INTERNAL, _DEFECT,
    "too little memory for {nodes} daemons",
    "they need about {needed}, and {free} are free",
    "take fewer (--nodes) or a smaller model, or end something else")
WRONG_USAGE = Problem("BE1120", Kind.INVALID, _USAGE, "{what}", fix="{fix}")
COMMAND_FAILED = Problem("BE1121", Kind.INTERNAL, _DEFECT,
    "the command met an unexpected {defect}",
    fix="run it again with --debug and report the traceback")
NOT_AN_ADDRESS = Problem("BE1130", Kind.INTERNAL, _DEFECT,
    "{url!r} is not the address of a daemon",
    fix="write it as http://127.0.0.1:7717/v1")
CONNECTION_LOST = Problem("BE1131", Kind.INTERNAL, "connection_lost",
    "lost the connection to the daemon",
    "{why}",
    "see its log; the session is kept and can go on")
NO_DAEMON = Problem("BE1132", Kind.INTERNAL, "no_daemon",
    "no daemon answers at {where}",
    "{why}",
    "start one with `batchengine serve MODEL.gguf`, or name the right address (--url,"
    " --admin-socket; each user's daemon has a socket of its own)")
START_FAILED = Problem("BE1133", Kind.INTERNAL, "start_failed",
    "the daemon did not start", "{why}", "read its output above")
DEMO_ENDED_BADLY = Problem("BE1134", Kind.INTERNAL, _DEFECT,
    "the daemon ended with exit code {status} instead of 0",
    fix="read its output above")
DEMO_FAILED = Problem("BE1135", Kind.INTERNAL, _DEFECT, "{what}", fix="report this")
KEY_UNSENDABLE = Problem("BE1136", Kind.INTERNAL, _DEFECT,
    "the API key cannot be sent",
    "it holds line breaks or letters outside ASCII",
    "set BATCHENGINE_API_KEY or the key file to the key alone")
COMMAND_UNSENDABLE = Problem("BE1137", Kind.INTERNAL, _DEFECT,
    "the command cannot be sent", "{why}", "{fix}")
ADMIN_FORBIDDEN = Problem("BE1138", Kind.INTERNAL, "admin_forbidden",
    "no access to the admin socket {where}",
    "{reason}: it is the socket of another user's daemon",
    "run the command as that user or as root, or name another --admin-socket")
SESSION_NOT_CHAT = Problem("BE1139", Kind.CONFLICT, "session_not_chat",
    "session {session:.80} cannot go on as a chat",
    "its messages cannot be recognised, and to send others would replace its history",
    "see it with `batchengine sessions messages`, or leave --session out for a new one")
FILE_UNUSABLE = Problem("BE1140", Kind.INVALID, _USAGE,
    "the file {path!s:.200} cannot be sent", "{why}", "name a text file (UTF-8) of at most 8 MiB")
AGENT_FILE = Problem("BE1141", Kind.INVALID, _USAGE,
    "the configuration {path!s:.200} is left as it is", "{why}",
    "name another file with --file, or add what the command shows without --write")
SERVICE_FILE = Problem("BE1149", Kind.INTERNAL, "service_file",
    "cannot install {path}", "{why}", "run it with sudo, or name another folder with --root")
OUTPUT_LOST = Problem("BE1150", Kind.INTERNAL, "output_lost",
    "the output cannot be written", "{why}", "free disk space, or send the output elsewhere")

# ------------------------------------------------------------------- 12: admission, engine, lanes
LOADING = Problem("BE1201", Kind.UNAVAILABLE, "loading_model",
    "the model is still loading",
    "{progress:.0%} done",
    "send the request again in a moment; GET /health turns to 200 when it is ready",
    retry_ms=1000)
DRAINING = Problem("BE1202", Kind.UNAVAILABLE, "draining",
    "the daemon is shutting down",
    "it finishes what is running and accepts no new request",
    "send the request again after the restart",
    retry_ms=5000)
PROMPT_TOO_LONG = Problem("BE1203", Kind.INVALID, "context_length_exceeded",
    "prompt does not fit: {asked}, this model's maximum context length is {n_ctx} tokens",
    "neither prompts nor answers are truncated",
    "shorten the prompt or max_tokens, or {longer}",
    param="prompt", details=("n_prompt_tokens", "n_ctx"))
OVERLOADED = Problem("BE1204", Kind.UNAVAILABLE, "overloaded",
    "too many requests are waiting",
    "{waiting} requests are queued, the limit",
    "send it again later, or raise {setting}")
SESSION_BUSY = Problem("BE1205", Kind.UNAVAILABLE, "session_busy",
    "this session has too many requests waiting",
    "a session computes one request at a time, {queued} are queued behind it",
    "wait for the answers, or use other session ids",
    retry_ms=1000)
CLIENT_TOO_SLOW = Problem("BE1206", Kind.TIMEOUT, "client_too_slow",
    "the stream was not read fast enough",
    "its buffer was full for {seconds:g} s",
    "read events as they come")
INVALID_REQUEST = Problem("BE1207", Kind.INVALID, "invalid_request", "{what}", fix="{fix}")
WAIT_TOO_LONG = Problem("BE1208", Kind.UNAVAILABLE, "overloaded",
    "the wait would be too long",
    "about {wait_s:.1f} s until it could start, and class {sla_class} waits at most"
    " {patience_s:.1f} s",
    "send it again later, or raise sla.{sla_class}.patience_s")
NOTHING_TO_EXPLAIN = Problem("BE1209", Kind.NOT_FOUND, "not_found",
    "nothing is known about {given:.80}",
    "no request or session of that name is among the latest 4,096 decisions",
    "use the x-request-id or x-batchengine-session-id of an answer, or see `batchengine sessions`")
LANE_DISAGREES = Problem("BE1210", Kind.INTERNAL, _DEFECT,
    "lane {lane} does not agree with this daemon about the model's numbers",
    "its self-test differs from what the KV was computed with",
    "restart the daemon; if it repeats, check the machine's memory and processor")
LANE_DOWN = Problem("BE1211", Kind.UNAVAILABLE, "lane_down",
    "the worker of lane {lane} cannot be started", "{why}", "{fix}")
MODEL_CHANGED = Problem("BE1212", Kind.UNAVAILABLE, "model_changed",
    "the model changed under the running daemon", "{why}", "restart the daemon",
    retry_ms=30_000)
REQUEST_FAILED = Problem("BE1213", Kind.INTERNAL, "request_failed",
    "this request could not be started",
    "a defect of the daemon ({defect}); other requests go on",
    "try it once more; if it fails again, report it with the daemon's log")
AMBIGUOUS_ID = Problem("BE1214", Kind.CONFLICT, "ambiguous_id",
    "{given!r:.82} names more than one request or session",
    "{found}",
    "give more characters of the id")
LANE_OTHER_MODEL = Problem("BE1215", Kind.INTERNAL, _DEFECT,
    "lane {lane} loaded another model than this daemon serves",
    "the model file was written or replaced since the daemon started",
    "restart the daemon to serve what is in the file now, or put the old file back")
GRAMMAR_REFUSED = Problem("BE1216", Kind.INVALID, "invalid_grammar",
    "the answer cannot be constrained to this schema or grammar",
    "{why}",
    "correct or simplify the schema or grammar", param="response_format")
KEY_QUEUE_FULL = Problem("BE1217", Kind.BUSY, "rate_limit_exceeded",
    "too many requests of this key are waiting",
    "{waiting} requests of it are queued, and {limit}",
    "wait for the answers, or raise {setting}")
LEAVING = Problem("BE1218", Kind.UNAVAILABLE, "draining",
    "the daemon takes no new sessions",
    "it was drained by its operator; sessions that it computes for go on",
    "send the request to another daemon, or undo it: batchengine drain --undo",
    retry_ms=5000)
GRAMMAR_UNAVAILABLE = Problem("BE1219", Kind.UNAVAILABLE, "grammar_unavailable",
    "no process for constrained answers could be started", "{why}",
    "send the request again; if it stays so, look for memory limits in the daemon's log",
    retry_ms=1000)
CLIENT_LEAVES = Problem("BE1225", Kind.UNAVAILABLE, "overloaded",
    "the client would leave before its answer begins",
    "about {wait_s:.1f} s until it could start, and the client waits {patience_s:.1f} s for"
    " the first byte of an answer that is sent whole",
    'ask for "stream": true, send it again later, or raise the timeout of the client')
ENGINE_FAILED = Problem("BE1299", Kind.UNAVAILABLE, "engine_failed",
    "the engine cannot compute any more",
    "{defect}",
    "look into the daemon's log, then restart it")

# ------------------------------------------------------------------ 13: model file, packed weights
MODEL_UNREADABLE = Problem("BE1301", Kind.INVALID, _USAGE,
    "cannot open model {path!s:.200}",
    "{why}",
    "check the path, and that the daemon's user may read the file and enter its folders")
GGUF_MAGIC = Problem("BE1302", Kind.INTERNAL, _DEFECT,
    "{file} is not a GGUF file",
    "{why}",
    "convert the model to GGUF, or name another file")
GGUF_VERSION = Problem("BE1303", Kind.INTERNAL, _DEFECT,
    "{file} cannot be read", "{why}", "{fix}")
GGUF_CUT_SHORT = Problem("BE1304", Kind.INTERNAL, _DEFECT,
    "{file} is cut short", "{why}", _NEW_FILE)
GGUF_COUNT = Problem("BE1305", Kind.INTERNAL, _DEFECT,
    "{file} declares {count} for {reading}", "the limit is {most}", _NEW_FILE)
GGUF_KEY_NAME = Problem("BE1306", Kind.INTERNAL, _DEFECT,
    "{file} has a bad key {key!r}", "{why}", _NEW_FILE)
GGUF_VALUE_TYPE = Problem("BE1307", Kind.INTERNAL, _DEFECT,
    "key {key} of {file} has a value that cannot be read", "{why}", _NEW_FILE)
GGUF_NOT_UTF8 = Problem("BE1308", Kind.INTERNAL, _DEFECT,
    "{reading} of {file} is not UTF-8", "at byte {start}: {reason}", _NEW_FILE)
GGUF_ALIGNMENT = Problem("BE1309", Kind.INTERNAL, _DEFECT,
    "general.alignment of {file} is {value!s:.40}", "{why}", _NEW_FILE)
TENSOR_NAME = Problem("BE1310", Kind.INTERNAL, _DEFECT,
    "tensor {tensor} {problem}", "in {file}", _NEW_FILE)
TENSOR_SHAPE = Problem("BE1311", Kind.INTERNAL, _DEFECT,
    "tensor {tensor} has {shape}", "{why}", _NEW_FILE)
TENSOR_TYPE = Problem("BE1312", Kind.INTERNAL, _DEFECT,
    "tensor {tensor} has the unknown type {number}",
    "this version knows no such storage type",
    "use a Q4_K_M or Q4_0 file of the model, or update batchengine")
TENSOR_UNALIGNED = Problem("BE1313", Kind.INTERNAL, _DEFECT,
    "tensor {tensor} starts at {offset}", "not a multiple of {alignment}", _NEW_FILE)
TENSOR_OUTSIDE = Problem("BE1314", Kind.INTERNAL, _DEFECT,
    "tensor {tensor} lies outside {file}",
    "it ends at byte {end}, the file has {size}",
    "the download is incomplete: fetch the file again")
TENSORS_OVERLAP = Problem("BE1315", Kind.INTERNAL, _DEFECT,
    "tensors {before} and {after} overlap", "in {file}", _NEW_FILE)
MODEL_PARTS = Problem("BE1316", Kind.INTERNAL, _DEFECT,
    "{file} is not a whole model", "{why}", "{fix}")
KEY_MISSING = Problem("BE1321", Kind.INTERNAL, _DEFECT,
    "{file} has no key {key}", "{wanted} is needed", _NEW_FILE)
KEY_VALUE = Problem("BE1322", Kind.INTERNAL, _DEFECT,
    "key {key} of {file} is {value}", "{why}", _NEW_FILE)
MODEL_UNSUPPORTED = Problem("BE1323", Kind.INTERNAL, _DEFECT,
    "{file} has {key} = {value!s:.60}, which cannot be served",
    "{why}",
    "{fix}")
TENSOR_MISSING = Problem("BE1324", Kind.INTERNAL, _DEFECT,
    "{file} has no tensor {tensor}", "one of shape {shape} is needed", _NEW_FILE)
TENSOR_WRONG_SHAPE = Problem("BE1325", Kind.INTERNAL, _DEFECT,
    "tensor {tensor} of {file} has the shape {shape}",
    "the metadata needs {wanted}",
    _NEW_FILE)
TENSOR_WRONG_TYPE = Problem("BE1326", Kind.INTERNAL, _DEFECT,
    "tensor {tensor} of {file} has the type {found}",
    "kernels exist for {wanted}",
    "quantise the model with llama-quantize to Q4_K_M or Q4_0")
TENSOR_NUMBERS = Problem("BE1327", Kind.INTERNAL, _DEFECT,
    "tensor {tensor} of {file} holds broken numbers", "{why}", _NEW_FILE)
TENSOR_UNUSED = Problem("BE1328", Kind.INTERNAL, _DEFECT,
    "tensor {tensor} of {file} has no role in this architecture",
    "leaving it out could change every answer",
    "use a file of one of the supported architectures")
CACHE_UNWRITABLE = Problem("BE1330", Kind.INTERNAL, _DEFECT,
    "cannot write the packed weights in {folder}",
    "{why}",
    "choose another cache folder (--cache-dir)")
CACHE_FULL = Problem("BE1331", Kind.INTERNAL, _DEFECT,
    "no room for the packed weights in {folder}",
    "{why}",
    "free some space there, or choose another cache folder (--cache-dir)")
MODEL_FILE_MOVED = Problem("BE1332", Kind.INTERNAL, _DEFECT,
    "{path} {change} while it was read",
    "{why}",
    "wait until the file is complete, then start again")
CACHE_UNREADABLE = Problem("BE1333", Kind.INTERNAL, _DEFECT,
    "the packed weights {path} cannot be read back",
    "{why}",
    "check the disk, or choose another cache folder (--cache-dir)")

# ------------------------------------------------------------------- 15: tokenizer, chat template
TOKENIZER_FAILED = Problem("BE1500", Kind.INTERNAL, _DEFECT,
    "the text could not be tokenised", "{why}")
VOCABULARY_UNUSABLE = Problem("BE1501", Kind.INTERNAL, "tokenizer_unusable",
    "the vocabulary of {file} cannot be used",
    "{why}",
    "check the tokenizer.ggml.* keys of the file, or convert the model again")
TEXT_NOT_UNICODE = Problem("BE1502", Kind.INVALID, "invalid_unicode",
    "the text is not valid Unicode",
    "lone surrogate U+{surrogate:04X} at character {position}",
    "send pairs of surrogates, or the character itself")
TEXT_TOO_LARGE = Problem("BE1503", Kind.INVALID, "text_too_large",
    "the text is larger than {mib} MiB", fix="send less text")
PRIVATE_CHARACTERS = Problem("BE1504", Kind.INVALID, "invalid_unicode",
    "the request uses every private-use character",
    fix="remove characters of the Unicode private use planes")
TOKENIZER_LIBRARY = Problem("BE1505", Kind.INTERNAL, _DEFECT,
    "the tokenizer library llama_cpp cannot be loaded", "{why}",
    "install the package llama-cpp-python again")
TEXT_UNUSABLE = Problem("BE1506", Kind.INVALID, "text_unusable",
    "the text cannot be tokenised by this model's tokenizer",
    "{why}",
    "send less text, or text without long runs of one kind of character")
TEXT_UNAVAILABLE = Problem("BE1507", Kind.UNAVAILABLE, "text_unavailable",
    "no process for the tokenizer works", "{why}",
    "send the request again; if it stays so, look for memory limits in the daemon's log",
    retry_ms=1000)
TOKENIZER_EXTRA = Problem("BE1508", Kind.INVALID, "tokenizer_unknown",
    "the vocabulary of {file} needs llama.cpp, which is not installed",
    "{why}: no other tokenizer here is proven to give its ids",
    "pip install 'batchengine[llama]' (llama.cpp is compiled, which takes minutes)")
TEMPLATE_BROKEN = Problem("BE1511", Kind.INTERNAL, "chat_template_invalid",
    "the model's chat template does not compile",
    "{why}",
    "repair tokenizer.chat_template in the file; plain completions still work")
TEMPLATE_FAILED = Problem("BE1512", Kind.INTERNAL, "chat_template_failed",
    "the model's chat template failed",
    "{why}",
    "plain completions still work; convert the model again with another chat template")
TEMPLATE_STOPPED = Problem("BE1513", Kind.INTERNAL, "chat_template_stopped",
    "the model's chat template was stopped",
    "{why}",
    "this model's template is faulty or hostile; plain completions still work")
INVALID_MESSAGES = Problem("BE1514", Kind.INVALID, "invalid_messages",
    "{what}", "{why}", "{fix}", param="messages")
MESSAGES_REFUSED = Problem("BE1515", Kind.INVALID, "messages_refused_by_template",
    "the model's chat template refuses these messages", "{why}", param="messages")

# -------------------------------------------------------------------------------------- 16: store
STORE_LOCKED = Problem("BE1601", Kind.UNAVAILABLE, "store_locked", "{what}", "{why}", "{fix}")
STORE_UNUSABLE = Problem("BE1602", Kind.UNAVAILABLE, "store_unusable", "{what}", "{why}", "{fix}")
STORE_UNOPENED = Problem("BE1603", Kind.INTERNAL, "store_unusable",
    "the KV store {folder} cannot be opened",
    "{why}",
    "choose another directory with --store, or fix its permissions")
STORE_FULL = Problem("BE1604", Kind.UNAVAILABLE, "store_full", "{what}", "{why}", "{fix}")
STORE_FAILED = Problem("BE1605", Kind.INTERNAL, "store_failed", "{what}", "{why}", "{fix}")
NOT_A_STORE = Problem("BE1606", Kind.INVALID, _USAGE, "{what}", "{why}", "{fix}")
STORE_GONE = Problem("BE1607", Kind.UNAVAILABLE, "store_gone", "{what}", "{why}", "{fix}")
STORE_TOO_SMALL = Problem("BE1608", Kind.INVALID, _USAGE,
    "store.budget_bytes = {budget_bytes:,} is too small for this model",
    "it holds {tokens} tokens of KV, and a session needs {least}",
    "set it to {wanted_bytes:,} or more, or leave it out: it is derived from memory and disk then")

# --------------------------------------------------------------------------------------- 17: HTTP
INVALID_JSON = Problem("BE1700", Kind.INVALID, "invalid_json",
    "the request body is not valid JSON", "{why}", "send one UTF-8 JSON object")
INVALID_FIELD = Problem("BE1701", Kind.INVALID, "invalid_value", "{what}", "{why}", "{fix}")
UNKNOWN_MODEL = Problem("BE1702", Kind.MISSING, "model_not_found",
    "the model {asked!r:.82} is not served here",
    "this daemon serves one model and never substitutes another",
    "use one of: {served}", param="model")
MISSING_FIELD = Problem("BE1703", Kind.INVALID, "missing_field",
    "{param} is required", fix="send it; GET /openapi.json has every field")
UNSUPPORTED_FIELD = Problem("BE1704", Kind.INVALID, "unsupported_parameter",
    "{what}", "the answer would not be what was asked for", "{fix}")
BODY_TOO_LARGE = Problem("BE1705", Kind.TOO_LARGE, "request_too_large",
    "the request body is larger than {bytes_max:,} bytes",
    fix="send a smaller body; server.body_bytes_max is the limit of a generation's")
WRONG_CONTENT_TYPE = Problem("BE1706", Kind.MEDIA_TYPE, "unsupported_media_type",
    "the content type is {seen:.62}",
    "a browser may send other types across sites without asking",
    "send Content-Type: application/json (UTF-8)")
CONTENT_ENCODED = Problem("BE1707", Kind.MEDIA_TYPE, "unsupported_content_encoding",
    "Content-Encoding {seen!r:.42} is refused",
    "a few compressed bytes can unpack into gigabytes",
    "send the body uncompressed")
WRONG_HOST = Problem("BE1708", Kind.FORBIDDEN, "host_not_allowed",
    "the Host header names a host this daemon does not answer for",
    "a web page could rebind its own name to this address",
    "use the address the daemon listens on, or start it with --allow-host NAME")
WRONG_ORIGIN = Problem("BE1709", Kind.FORBIDDEN, "origin_not_allowed",
    "requests from this web origin are refused",
    "a web page must not use the daemon unless its origin is allowed",
    "add {origin} to server.allowed_origins, or call the daemon from a program")
INVALID_API_KEY = Problem("BE1710", Kind.UNAUTHENTICATED, "invalid_api_key",
    "the API key is {problem}",
    "this daemon was started with API keys; only the dashboard's page and the routes of"
    " server.keyless_routes need none",
    "send Authorization: Bearer KEY")
UNKNOWN_ROUTE = Problem("BE1711", Kind.NOT_FOUND, "route_not_found",
    "there is no route {method} {path:.80}", fix="{fix}")
WRONG_METHOD = Problem("BE1712", Kind.METHOD, "method_not_allowed",
    "{method} is not possible on this route", fix="use {usable}",
    details=("allowed",))  # also the value of the Allow header
NOT_SUPPORTED = Problem("BE1713", Kind.NOT_FOUND, "not_supported",
    "this daemon has no {path:.80}", "{why}", "{fix}")
TOO_MANY_CONNECTIONS = Problem("BE1714", Kind.UNAVAILABLE, "too_many_connections",
    "all {connections_max:,} connections are in use",
    fix="retry, or raise limits.streams_max and the limit of open files", retry_ms=1000)
BODY_TOO_SLOW = Problem("BE1718", Kind.TIMEOUT, "request_timeout",
    "the request body did not arrive within {seconds:g} s", fix="send the whole body at once")
INTERNAL_ERROR = Problem("BE1719", Kind.INTERNAL, _DEFECT,
    "internal error in request {request_id}",
    "the daemon's log holds the details under that id",
    "retry; if it happens again, report it with the log")
MALFORMED_HTTP = Problem("BE1720", Kind.INVALID, "malformed_http",
    "the request is not well-formed HTTP/1.1",
    fix="send one Host header, at most 128 headers, printable and below 8 KiB each, no conflicting"
    " lengths, and no Expect but 100-continue")
UNKNOWN_FIELD = Problem("BE1721", Kind.INVALID, "unknown_parameter",
    "{param} is not a known field here", fix="leave it out; GET /openapi.json has every field")
UNKNOWN_FIELDS = Problem("BE1722", Kind.INVALID, "unknown_parameter",
    "unknown fields in strict mode: {names}",
    "?strict=1 turns every field this daemon does not know into an error",
    "remove them, or drop ?strict=1")
TOO_MANY_REQUESTS = Problem("BE1723", Kind.UNAVAILABLE, "too_many_requests",
    "{running:,} {what} are open, the limit is {limit:,}",
    fix="retry after the time given", retry_ms=2000)
CANCELLED = Problem("BE1724", Kind.CONFLICT, "cancelled",
    "the request was cancelled",
    "the operator of the daemon cancelled it",
    "ask the operator before sending it again")
ONE_LANE = Problem("BE1729", Kind.CONFLICT, "one_lane",
    "there is no other lane to move to",
    "this daemon has one lane, {lane}",
    "start it with --lanes 2, or write two [[lane]] tables into its configuration")
UNKNOWN_KEY_NAME = Problem("BE1731", Kind.NOT_FOUND, "session_not_found",
    "there is no API key called {given!r:.82}",
    "the configuration has none of that name, and no session of such a key is stored",
    "{fix}", param="tenant")
SESSION_AT_REST = Problem("BE1732", Kind.CONFLICT, "not_moved",
    "session {session_id} is on no lane",
    "it is in the ledger only, since the daemon started or since it became idle",
    "nothing is lost: its next request chooses a lane, a fast one for class interactive")
TOO_MANY_BODIES = Problem("BE1733", Kind.UNAVAILABLE, "too_many_bodies",
    "request bodies of more than {bytes_max:,} bytes are on their way at once",
    "they are held in memory until they are read and tokenised",
    "retry after the time given, or send smaller bodies", retry_ms=2000)
PAGE_REFUSED = Problem("BE1734", Kind.FORBIDDEN, "origin_not_allowed",
    "a web page may have sent this request, which takes a running answer over",
    "it names its session in the address alone, as an image on any page could",
    "name the session in the header {header}")
TOO_MANY_OF_KEY = Problem("BE1735", Kind.BUSY, "rate_limit_exceeded",
    "{running:,} requests of this key are open",
    "the rest of the {limit:,} is for other keys",
    "wait for the answers, or raise auth.keys.NAME.streams_max", retry_ms=2000)
THREADS_UNSUPPORTED = Problem("BE1736", Kind.INVALID, "unsupported_parameter",
    "message threads are not kept here",
    "a request that continues one holds the newest messages alone, so the model would not know the"
    " rest",
    "send the whole conversation without thread: what was computed of it is found again. The SDK"
    " does so by itself in tool_runner(), and in thread() with"
    " unsupported_request_behavior=\"continue_unthreaded\"", param="thread")
TEXT_OF_BODY_TOO_LARGE = Problem("BE1737", Kind.TOO_LARGE, "request_too_large",
    "the request body has more than {bytes_max:,} bytes beside images and files",
    "a prompt that long does not fit the context of {context:,} tokens",
    "send a smaller body")
ANSWER_TOO_LARGE = Problem("BE1750", Kind.INVALID, "answer_too_large",
    "the answer would be larger than {mib} MiB", fix="send a part of it at a time")
LOOKS_LIKE_TLS = Problem("BE1751", Kind.INVALID, "malformed_http",
    "this looks like TLS", "the port speaks plain HTTP", "use http:// instead of https://")

# ----------------------------------------------------------------- 21: frames between processes
FRAME_MAGIC = Problem("BE2101", Kind.INTERNAL, _DEFECT, "not a batchengine frame", "{why}")
FRAME_VERSION = Problem("BE2102", Kind.INTERNAL, _DEFECT,
    "the other side speaks another link version", "{why}")
FRAME_HEADER = Problem("BE2103", Kind.INTERNAL, _DEFECT, "frame header is damaged", "{why}")
FRAME_FLAGS = Problem("BE2104", Kind.INTERNAL, _DEFECT, "frame has unknown flags", "{why}")
FRAME_KIND = Problem("BE2105", Kind.INTERNAL, _DEFECT, "frame of unknown kind", "{why}")
META_TOO_LONG = Problem("BE2106", Kind.INTERNAL, _DEFECT, "frame meta exceeds its cap", "{why}")
PAYLOAD_TOO_LONG = Problem("BE2107", Kind.INTERNAL, _DEFECT,
    "frame payload exceeds its cap", "{why}")
FRAME_META = Problem("BE2108", Kind.INTERNAL, _DEFECT,
    "frame meta does not match its schema", "{why}")
FRAME_MISMATCH = Problem("BE2109", Kind.INTERNAL, _DEFECT,
    "frame header and meta name different messages", "{why}")
FRAME_TRUNCATED = Problem("BE2110", Kind.INTERNAL, _DEFECT, "link ended inside a frame", "{why}")

# ------------------------------------------------------------------------------------- 22: worker
STEP_REFUSED = Problem("BE2201", Kind.INTERNAL, _DEFECT, "step refused", "{why}")
FRAME_UNEXPECTED = Problem("BE2202", Kind.INTERNAL, _DEFECT, "unexpected {message}")
ATTACH_BEFORE_LOAD = Problem("BE2203", Kind.INTERNAL, _DEFECT, "Attach before Load")
ATTACHED_TWICE = Problem("BE2204", Kind.INTERNAL, _DEFECT, "this worker is already attached")
STEP_BEFORE_ATTACH = Problem("BE2205", Kind.INTERNAL, _DEFECT, "Step before Attach")
LAYOUT_DISAGREES = Problem("BE2206", Kind.INTERNAL, _DEFECT,
    "kernels and store disagree about the page layout")
ARITHMETIC_WRONG = Problem("BE2207", Kind.INTERNAL, _DEFECT,
    "this build computes other numbers than every other lane",
    "{why}",
    "build the kernels again on this machine (`make native`), with no library preloaded")
LINK_FILES = Problem("BE2208", Kind.INTERNAL, "peers_config",
    "the certificate of the data links cannot be used",
    "{why}",
    "check the files of [peers], or make new ones with `batchengine peers init`")
GPU_UNUSABLE = Problem("BE2209", Kind.INTERNAL, "gpu_unusable",
    "GPU {index} cannot be used", "{why}",
    "check the driver and [[lane]] device and vram_bytes, or remove the lane of kind cuda")
GPU_DISAGREES = Problem("BE2210", Kind.INTERNAL, _DEFECT,
    "the GPU computes other numbers than the CPU",
    "a step of {tokens} tokens differs",
    "remove the lane of kind cuda; check the GPU and its driver")
GPU_FAILED = Problem("BE2211", Kind.INTERNAL, "gpu_failed", "a GPU failed", "{why}",
    "look into the kernel's log; the lane starts again with a new process")
GPU_REQUIRED = Problem("BE2212", Kind.INTERNAL, "gpu_required",
    "a GPU is required, and none is up", "{why}",
    "check the driver and [[lane]] device and vram_bytes, or serve from the CPU without --require"
    " gpu")
WORKER_FAILED = Problem("BE2299", Kind.INTERNAL, _DEFECT, "the worker failed", "{defect}")

# -------------------------------------------------------------------------------- 23: computation
REQUEST_TOO_LARGE = Problem("BE2301", Kind.INVALID, "kv_too_small",
    "the request can never run here",
    "it needs up to {pages_max} KV pages; {room}",
    "shorten the prompt or max_tokens, or raise store.budget_bytes")
NUMERIC_FAULT = Problem("BE2302", Kind.INTERNAL, "numeric_fault",
    "a number of this generation was not finite",
    "the computation produced NaN or infinity; its KV was discarded",
    "send the request again; if it repeats, verify the model file",
    details=("request_id",))
SESSION_QUARANTINED = Problem("BE2303", Kind.INTERNAL, "session_quarantined",
    "session {session_id} is quarantined",
    "it ended the process that computed it {strikes} times while running alone",
    "report it with the daemon's log; drop the session to lift the quarantine")
NO_ROOM = Problem("BE2304", Kind.UNAVAILABLE, "kv_full",
    "there is no room for the KV of this request",
    "it has {pages} pages, and neither the lane's open slots nor the store had room for more",
    "free disk space where the store lies, shorten the prompt, or raise lane.open_pages",
    details=("request_id",))
STEP_MISMATCH = Problem("BE2305", Kind.INTERNAL, _DEFECT,
    "the worker answered another step than it was asked",
    "other {what} than were asked for")
PAGES_DIFFER = Problem("BE2306", Kind.INTERNAL, "numeric_fault",
    "pages of this generation were computed with different results",
    "two computations of the same tokens gave other bytes, more than once",
    "see /health and the daemon's log; check the machine's memory",
    details=("request_id",))
WORKER_KILLER = Problem("BE2307", Kind.INTERNAL, "session_quarantined",
    "this session ended the worker process twice while running alone",
    "it was stopped so that other sessions can go on",
    "report it with the daemon's log; do not send the same prompt again",
    details=("request_id",))
NO_ROOM_AT_PEERS = Problem("BE2308", Kind.UNAVAILABLE, "kv_full",
    "there is no room for the KV of this request now",
    "it needs up to {pages_max} KV pages; this daemon and the peers that it reaches have {budget}",
    "send it again later, or shorten the prompt or max_tokens; `batchengine peers status` shows"
    " which peers are away",
    details=("request_id",), retry_ms=5000)
NO_ROOM_BESIDE_PEERS = Problem("BE2309", Kind.UNAVAILABLE, "kv_full",
    "there is no room for the KV of this request beside pages of peers",
    "it has {pages} of up to {pages_max} pages, {held} of them with peers; {lent} pages of this"
    " store are kept for peers, and peers would keep {free} more",
    "send it again later, or shorten the prompt or max_tokens; a lower [peers] hold_bytes keeps"
    " less for peers",
    details=("request_id",), retry_ms=5000)

# ----------------------------------------------------------------------------------- 24: sessions
SESSION_DAMAGED = Problem("BE2401", Kind.INTERNAL, "session_damaged",
    "this session's history is damaged",
    "{why}",
    "use another session id; other sessions are not affected")
NOT_DURABLE = Problem("BE2402", Kind.UNAVAILABLE, "durability_unavailable",
    "the turn could not be made durable",
    "{why}",
    "free space where the store lies, or look into the daemon's log; then send it again")
UNKNOWN_SESSION = Problem("BE2403", Kind.NOT_FOUND, "session_not_found",
    "there is no session {given:.80}",
    "you have none of that name: it was never used here, or it was dropped",
    "use your own session id or the x-batchengine-session-id of an answer; the operator sees all"
    " with `batchengine sessions --all`, and 4 letters of an id are enough there")
NOTHING_TO_RESUME = Problem("BE2404", Kind.CONFLICT, "nothing_to_resume",
    "session {session_id} has no turn to resume",
    "it has computed nothing yet, its last turn was written by an older program or for another"
    " tokenizer, or another request came first",
    "send the request itself")
RESUMED_ELSEWHERE = Problem("BE2405", Kind.CONFLICT, "resumed_elsewhere",
    "this stream was resumed by another connection",
    "a turn has one reader, and the newest one wins",
    "read the other stream, or resume again to take it back")
OTHER_REQUEST_OF_KEY = Problem("BE2406", Kind.CONFLICT, "idempotency_conflict",
    "this idempotency key was used for another request",
    "the prompt, a limit or the sampling is not what was sent with it, or the answer is gone: the"
    " session's history was edited since",
    "use a new key for a new request")
SESSION_IN_USE = Problem("BE2407", Kind.CONFLICT, "session_busy",
    "session {session_id} cannot be parked now",
    "it has a request that is not finished",
    "wait for the request to end, or cancel it", retry_ms=1000)
SESSION_EXISTS = Problem("BE2408", Kind.CONFLICT, "session_exists",
    "there is a session {given:.80} already",
    "a fork begins a session, it replaces none",
    "choose another id for the fork, or drop that session first", param="session_id")
FROM_TOKEN_OUTSIDE = Problem("BE2409", Kind.INVALID, "invalid_value",
    "the answer has no token {from_token}",
    "it may have up to {tokens_max}, and the first one is 0",
    "name how many tokens were received", param="from")
SESSION_DROPPED = Problem("BE2414", Kind.MISSING, "session_not_found",
    "session {session_id} was dropped while it computed",
    "its client or the operator asked for that; its history is gone",
    "send the whole conversation again if the answer is still wanted")
NOT_DROPPED = Problem("BE2416", Kind.CONFLICT, "session_busy",
    "session {session_id} is not dropped yet",
    "its turns were ended, but its lane has not released it in {waited_s:.0f} s",
    "ask again; `batchengine ps` shows what its lane does")
TURN_FOLLOWED = Problem("BE2417", Kind.CONFLICT, "turn_followed",
    "turn {turn_id} cannot be resumed",
    "another turn of session {session_id} followed it, or its history no longer holds that turn",
    "GET /v1/sessions/ID lists the session's turns; send the request itself to have its answer,"
    " with its Idempotency-Key if it had one")
TURN_OF_OTHER_MODEL = Problem("BE2418", Kind.CONFLICT, "turn_of_other_model",
    "turn {turn_id} of session {session_id} cannot go on",
    "another model, or this one with other arithmetic, began its answer ({changed} differ): one"
    " answer would be of two models",
    "send the request itself for an answer of this model, with another Idempotency-Key if it had"
    " one")
NOT_ERASED = Problem("BE2419", Kind.UNAVAILABLE, "not_erased",
    "session {session_id} is not erased yet",
    "{why}",
    "its requests were ended; ask again once the store's disk can be written")
NOT_APPENDABLE = Problem("BE2420", Kind.INVALID, "not_appendable",
    "the messages cannot be appended to the session", "{why}",
    "send the whole conversation, without batchengine.append or previous_response_id",
    param="batchengine.append")
UNKNOWN_TURN = Problem("BE2421", Kind.MISSING, "unknown_turn",
    "there is no turn {turn_id}",
    "it was never made or not stored, or its session has changed or had 64 turns since",
    "send the whole conversation")
UNKNOWN_RESPONSE = Problem("BE2422", Kind.MISSING, "response_not_found",
    "Response with id '{given:.80}' not found.",
    "It was never made or not stored, its session has changed or had 64 turns since, or another"
    " key made it")
UNKNOWN_PREVIOUS = Problem("BE2423", Kind.MISSING, "previous_response_not_found",
    "Previous response with id '{given:.80}' not found.",
    "It was never made or not stored, its session has changed or had 64 turns since, or another"
    " key made it",
    "send the whole conversation as input", param="previous_response_id")
SHORT_ID = Problem("BE2425", Kind.INVALID, "invalid_value",
    "{given!r:.82} is too short for a beginning of an id",
    "{least} characters after be_ are needed, or more if several begin so",
    "give more characters, or the whole name that the client uses")
UNKNOWN_ITEM = Problem("BE2426", Kind.MISSING, "item_not_found",
    "Item with id '{given:.80}' not found.",
    "Items are not persisted when `store` is set to false, nor once the session of their response"
    " has changed, and are those of one key",
    "send the item itself instead of a reference to it", param="input")
INPUT_NOT_KEPT = Problem("BE2427", Kind.MISSING, "input_not_kept",
    "the input items of response {given:.80} are not kept",
    "more than {kib} KiB of input, compressed, are not",
    "GET /v1/sessions/ID/messages has the text of the whole conversation")
SESSION_OF_OTHER_TOKENS = Problem("BE2428", Kind.CONFLICT, "session_of_other_model",
    "session {session_id} holds tokens of another model", "this one has another tokenizer",
    "send the whole conversation, which takes their place, or serve the model of the session")

# -------------------------------------------------------------------------------------- 25: peers
PEER_IDENTITY = Problem("BE2501", Kind.INVALID, _USAGE,
    "there is no usable certificate for links in {folder}", "{why}", "{fix}")
PEER_FILES_EXIST = Problem("BE2502", Kind.INVALID, _USAGE,
    "{path} exists already",
    "nothing is overwritten",
    "{fix}")
PEER_NAME = Problem("BE2503", Kind.INVALID, _USAGE,
    "{given!r:.82} is not a name for a peer", "{why}", "{fix}")
PEER_ADDRESS = Problem("BE2504", Kind.INVALID, _USAGE,
    "{given!r:.82} is not the address of a peer", fix="write it as {rule}")
PEER_BUNDLE = Problem("BE2505", Kind.INVALID, _USAGE,
    "the bundle {path} cannot be used",
    "{why}",
    "make it again with `batchengine peers add` where `peers init` was run, and copy it whole")
PEER_UNWRITABLE = Problem("BE2506", Kind.INTERNAL, "peer_files_unwritable",
    "cannot write {path}", "{why}", "run the command as the user who runs the daemon, or as root")
PEERS_OFF = Problem("BE2507", Kind.CONFLICT, "peers_off",
    "links to other daemons are off",
    "this daemon was started without an address to listen on for them",
    "start it with serve --peer-listen HOST:PORT, or set listen in [peers]")
PEER_DOWN = Problem("BE2508", Kind.UNAVAILABLE, "peer_down",
    "there is no link to peer {peer}", "{why}", "see `batchengine peers status`")
PEER_SLOW = Problem("BE2509", Kind.UNAVAILABLE, "peer_slow",
    "peer {peer} did not answer within {seconds:g} s",
    fix="see `batchengine peers status`")

# -------------------------------------------------------------------------------------- 30: moves
AMBIGUOUS_SESSION = Problem("BE3002", Kind.CONFLICT, "ambiguous_session",
    "{given:.80} means {count} sessions",
    "{found}",
    "give more characters, or the key's name with --key-name")
UNKNOWN_LANE = Problem("BE3003", Kind.INVALID, "unknown_lane",
    "there is no lane {given!r:.82}", fix="use {lanes}", param="to")
NO_OTHER_LANE = Problem("BE3004", Kind.CONFLICT, "no_other_lane",
    "there is no lane to move to from {lane}",
    "no other lane is up and has room for one more session",
    "configure a second [[lane]], or wait until one is back")
NOT_MOVED = Problem("BE3005", Kind.CONFLICT, "not_moved",
    "the session stays {where}",
    "{why}",
    "nothing is lost: ask again if `batchengine sessions` lists it, or name another lane")
# fmt: on

CATALOGUE = {row.code: row for row in tuple(globals().values()) if isinstance(row, Problem)}


def of_request(error: Exception) -> BatchEngineError:
    """Return the error that a client gets for `error`; of a defect it names only the type."""
    if isinstance(error, BatchEngineError):
        return error
    return REQUEST_FAILED(defect=type(error).__name__)


def received(
    code: str,
    what: str,
    why: str,
    fix: str,
    *,
    param: str | None = None,
    retry_ms: int | None = None,
    details: dict[str, int | str] | None = None,
) -> BatchEngineError:
    """Make the error that another process reported; an unknown code gives an internal error."""
    row = CATALOGUE.get(code)
    kind, name = (Kind.INTERNAL, _DEFECT) if row is None else (row.kind, row.name)
    return BatchEngineError(
        code, kind, name, what, why, fix, param=param, retry_ms=retry_ms, details=details
    )
