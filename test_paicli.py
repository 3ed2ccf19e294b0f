"""Tests of paicli.py, one class per section.  Each class is also an exercise.

    python -m unittest                             all tests (no network, some seconds)
    python -m unittest test_paicli.TestTools       one section

To learn by doing, write a section yourself:

    python test_paicli.py blank agent              writes exercise_agent.py: that section, bodies gone
    python test_paicli.py check agent              tests it inside the rest of paicli, first failure first

Edit only exercise_*.py.  The answers are in paicli.py; look after trying.

    python test_paicli.py prove                    the guard of these tests: every section copied out
                                                   passes, every function blanked alone fails
    python test_paicli.py map | bench              the sections; what PaiCLI costs, as ratios
    python test_paicli.py run ARGS                 paicli.py ARGS, with an exercise swapped in
"""
import ast
import base64
import contextlib
import email.utils
import http.server
import importlib
import io
import json
import os
import pathlib
import queue
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest

import paicli

HERE = pathlib.Path(__file__).resolve().parent
PATH = HERE / "paicli.py"
MAX_LINES = 4500
POSIX = os.name == "posix"


# ---- Swapping in a learner's section ------------------------------------------------------------
# All of paicli's functions look names up in one dict, vars(paicli), when they are called.  Putting a
# learner's definitions there makes the rest of the program use them.

def swap_in(name):
    """Give paicli the functions and classes that module `name` defines itself."""
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except Exception as e:
        where = getattr(e, "lineno", None) or (e.__traceback__ and _last_line(e.__traceback__))
        sys.exit(f"{name}.py can't be imported, line {where}: {type(e).__name__}: {e}")
    vars(paicli).update({k: v for k, v in vars(module).items()
                         if getattr(v, "__module__", None) == name})


def _last_line(traceback):
    while traceback.tb_next:
        traceback = traceback.tb_next
    return traceback.tb_lineno


if os.environ.get("PAICLI"):
    swap_in(os.environ["PAICLI"])


# ---- The book as data: sections, what they define and use ---------------------------------------

class Section:
    """A section of paicli.py: number, title, slug, its line numbers and its top-level statements."""

    def __init__(self, number, title, first, last, tree):
        self.number, self.title, self.first, self.last = number, title, first, last
        self.slug = re.sub(r"\W+", "_", title.lower())
        self.test_class = "Test" + "".join(w.title() for w in re.split(r"\W+", title))
        self.nodes = [n for n in tree.body if first <= n.lineno <= last]
        self.names = set().union(*(bound(n) for n in self.nodes), set())


def bound(node):
    """Names that a top-level statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    return {n.id for t in targets if t is not None for n in ast.walk(t) if isinstance(n, ast.Name)}


def used(nodes):
    """Names that statements read, anywhere inside."""
    return {n.id for node in nodes for n in ast.walk(node)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def book():
    """-> (source, tree, sections)"""
    source = PATH.read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 9))
    marks = [(source.count("\n", 0, m.start()) + 1, int(m[1]), m[2])
             for m in re.finditer(r"^# (\d+)\. ([A-Z][A-Z0-9 -]+)$", source, re.M)]
    ends = [line - 2 for line, _, _ in marks[1:]] + [source.count("\n") + 1]
    return source, tree, [Section(n, title, line - 1, end, tree)
                          for (line, n, title), end in zip(marks, ends)]


def section(slug):
    """The section of that slug or number; exits with the list if there is none."""
    found = [s for s in book()[2] if slug.lower().replace("-", "_") in (s.slug, str(s.number))]
    if not found:
        sys.exit(f"no section {slug!r}; there are " + ", ".join(s.slug for s in book()[2]))
    return found[0]


def functions(one):
    """-> [(qualified name, ast node)] of a section's functions and methods that have a body to blank."""
    found = []
    for node in one.nodes:
        inside = node.body if isinstance(node, ast.ClassDef) else []
        prefix = node.name + "." if inside else ""
        found += [(prefix + f.name, f) for f in inside or [node] if isinstance(f, ast.FunctionDef)]
    return [(name, f) for name, f in found if f.body[1:] or ast.get_docstring(f) is None]


def copy_of(one, blanked=lambda name: False):
    """Source of a module that holds one section; bodies of blanked(qualified name) are gone."""
    source, tree, sections = book()
    lines = source.split("\n")
    for name, f in reversed(functions(one)):
        if blanked(name):
            body = f.body[1:] if ast.get_docstring(f) is not None else f.body
            first, head = body[0].lineno, ""
            if first == f.lineno or first == f.body[0].lineno and len(f.body) != len(body):
                head = lines[first - 1][:body[0].col_offset].rstrip() + "\n"    # a one-line def
            pad = " " * (f.col_offset + 4)
            lines[first - 1:f.end_lineno] = [
                f'{head}{pad}raise NotImplementedError("exercise {one.number}: {name}")'] + [
                None] * (f.end_lineno - first)
    text = [line for line in lines[one.first - 1:one.last] if line is not None]
    above = set().union(*(s.names for s in sections if s.number < one.number), {"__version__"})
    need = ", ".join(sorted(above & used(one.nodes)))
    imports = [ast.get_source_segment(source, n) for n in tree.body
               if isinstance(n, (ast.Import, ast.ImportFrom))]
    if need:
        imports += textwrap.wrap(f"from paicli import ({need})", 98, subsequent_indent=" " * 20)
    title = f'"""Exercise {one.number}, {one.title}.  Edit only this file; then: make check SECTION={one.slug}"""'
    return "\n".join([title, *imports, "", *text]) + "\n"


# ---- Fakes: they speak the real protocols --------------------------------------------------------

def chunk(text=None, calls=None, finish=None, usage=None, **delta):
    """One event of a model's stream, as JSON text."""
    if text is not None:
        delta["content"] = text
    if calls is not None:
        delta["tool_calls"] = calls
    event = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return json.dumps({**event, "usage": usage} if usage else event)


def piece(index=None, id_=None, name=None, arguments=None):
    """A fragment of a tool call; what is None is left out."""
    function = {k: v for k, v in (("name", name), ("arguments", arguments)) if v is not None}
    return {k: v for k, v in (("index", index), ("id", id_), ("function", function)) if v is not None}


def says(text, **usage):
    """A script entry: the model answers with a text."""
    return sse(chunk(text), chunk(finish="stop", usage=usage or {"prompt_tokens": 5, "completion_tokens": 2}))


def calls(*wanted):
    """A script entry: the model asks for tools; each wanted is (name, arguments)."""
    return sse(chunk(calls=[piece(i, f"call_{i}_{time.monotonic_ns()}", n, a if isinstance(a, str) else json.dumps(a))
                            for i, (n, a) in enumerate(wanted)]), chunk(finish="tool_calls"))


def sse(*events, done=True, cut=b""):
    """A script entry: these events, perhaps [DONE], perhaps a cut-off rest."""
    lines = [f"data: {e}\n\n" for e in events] + (["data: [DONE]\n\n"] if done else [])
    return 200, {"Content-Type": "text/event-stream"}, "".join(lines).encode("utf-8") + cut


def refuses(status, body, **headers):
    """A script entry: an error answer; body is text or becomes JSON."""
    text = body if isinstance(body, str) else json.dumps(body)
    return status, {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}, \
        text.encode("utf-8")


def strict_fault(messages):
    """What a strict server would refuse in a history, or ""."""
    open_calls = []
    for m in messages:
        if m["role"] not in ("system", "user", "assistant", "tool") or "content" not in m:
            return f"bad message {m}"
        if set(m) - {"role", "content", "tool_calls", "tool_call_id", "reasoning_content"}:
            return f"unknown fields in {m}"
        if m["role"] == "tool":
            if m["tool_call_id"] not in open_calls:
                return "a tool message must follow its call"
            open_calls.remove(m["tool_call_id"])
            continue
        if open_calls:
            return "an assistant message with 'tool_calls' must be followed by tool messages"
        if m["role"] == "assistant" and not m["content"] and not m.get("tool_calls"):
            return "empty assistant message"
        for call in m.get("tool_calls", ()):
            if not re.fullmatch(r"[\w-]{1,64}", call["function"]["name"]):
                return "bad tool name"
            if not isinstance(json.loads(call["function"]["arguments"]), dict):
                return "invalid tool call arguments"
            open_calls.append(call["id"])
        if len(open_calls) != len(set(open_calls)):
            return "ids must differ"
    return "calls without results" if open_calls else ""


class FakeServer:
    """An HTTP server on a real socket.  `script` has one (status, headers, body) per request, or a
    function (handler) that answers itself; it is strict about histories."""

    def __init__(self, *script, tls=None):
        self.script, self.requests, self.n_connections = list(script), [], 0
        self.release = threading.Event()     # a handler may wait for it
        fake = self      # for the handler, whose self is another

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            fake = self

            def setup(self):
                super().setup()
                fake.n_connections += 1

            def log_message(self, *args):
                pass

            def do_POST(self):
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = json.loads(raw) if raw else None
                fake.requests.append({"method": self.command, "path": self.path, "headers": self.headers, "body": body})
                fault = strict_fault(body["messages"]) if isinstance(body, dict) and "messages" in body else ""
                entry = refuses(400, {"error": {"message": "strict: " + fault}}) if fault else (
                    fake.script.pop(0) if fake.script else refuses(500, "the script is over"))
                if callable(entry):
                    return entry(self)
                self.answer(*entry)

            do_GET = do_PUT = do_CONNECT = do_POST

            def answer(self, status, headers, body):
                self.send_response(status)
                for k, v in headers.items():
                    self.send_header(k, v)
                if "Content-Length" not in headers:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        class Server(http.server.ThreadingHTTPServer):
            def handle_error(self, request, client_address):
                pass                         # a client that goes away is part of the tests
        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        if tls:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.release.set()
        self.server.shutdown()
        self.server.server_close()


def streams_then_waits(*events):
    """A script entry: send the events, then nothing until the server ends."""
    def answer(handler):
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        handler.wfile.write("".join(f"data: {e}\n\n" for e in events).encode("utf-8"))
        handler.wfile.flush()
        handler.fake.release.wait(10)
    return answer


class FakeCancel(paicli.Cancel):
    """A Cancel whose sleep takes no time and is remembered."""

    def __init__(self):
        super().__init__()
        self.slept = []

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.check()


class ScriptedModel:
    """A model that gives the replies of a list, and remembers what it was sent."""

    def __init__(self, *replies):
        self.replies, self.sent = list(replies), []

    def reply(self, messages, tools, on_delta, cancel):
        self.sent.append([dict(m) for m in messages])
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        reply = reply(messages) if callable(reply) else reply
        if isinstance(reply, Exception):
            raise reply
        if reply.text:
            on_delta("text", reply.text)
        return reply


def call(name, arguments=None, id_="c1"):
    """A ToolCall with its arguments as JSON."""
    return paicli.ToolCall(id_, name, arguments if isinstance(arguments, str) else json.dumps(arguments or {}))


def reply_of(*wanted, text="", finish="tool_calls"):
    """A Reply with these tool calls, their ids made different."""
    return paicli.Reply(text, "", [c._replace(id=f"{c.id}_{i}_{time.monotonic_ns()}") for i, c in enumerate(wanted)],
                        paicli.Usage(10, 5), finish)


def allow(tool, arguments, reason, cancel):
    """A decide() that allows."""
    return paicli.Decision("allow")


def run_program(*args, stdin=None, cwd=None, timeout=20, **variables):
    """Run paicli with these arguments, an empty home and no keys; -> CompletedProcess with text."""
    env = {k: v for k, v in os.environ.items() if not k.endswith(("API_KEY", "_proxy", "_PROXY"))}
    env["PYTHONPATH"] = os.pathsep.join([os.getcwd(), str(HERE)])
    env.update({k: v for k, v in variables.items() if v is not None})
    return subprocess.run([sys.executable, str(HERE / "test_paicli.py"), "run", *args], cwd=cwd, env=env,
                          input=stdin, stdin=subprocess.DEVNULL if stdin is None else None, timeout=timeout,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace")


def wait_for(condition, seconds=10):
    """Wait until condition() is true; return its value."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


class Case(unittest.TestCase):
    """What the classes share: an empty folder as self.folder."""

    maxDiff = None

    def setUp(self):
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)
        self.folder = os.path.realpath(self.stack.enter_context(tempfile.TemporaryDirectory()))

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, data):
        path = self.path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(data if isinstance(data, bytes) else data.encode("utf-8"))
        return path

    def bytes_of(self, name):
        with open(self.path(name), "rb") as f:
            return f.read()

    def raises(self, error, pattern, function, *args, **kwargs):
        """function(...) must raise error with a text that matches; returns the error."""
        with self.assertRaises(error) as caught:
            function(*args, **kwargs)
        self.assertRegex(str(caught.exception), pattern)
        return caught.exception

    def http(self, **options):
        http = paicli.Http(**options)
        self.stack.callback(http.close)
        return http

    def server(self, *script, **options):
        return self.stack.enter_context(FakeServer(*script, **options))


# ---- The book -------------------------------------------------------------------------------------

class TestTheBook(unittest.TestCase):
    """paicli.py can be read from top to bottom."""

    @classmethod
    def setUpClass(cls):
        cls.source, cls.tree, cls.sections = book()

    def places(self, pattern, home):
        """Sections other than `home` whose code has the pattern."""
        lines = self.source.split("\n")
        return [s.title for s in self.sections if s.title not in home and any(
            re.search(pattern, line) and not line.lstrip().startswith("#") for line in lines[s.first - 1:s.last])]

    def test_each_section_uses_only_what_stands_above_it(self):
        for one in self.sections:
            below = set().union(*(s.names for s in self.sections if s.number > one.number), set())
            self.assertEqual(set(), used(one.nodes) & below - set(dir(__builtins__)), one.title)

    def test_the_map_in_the_docstring_is_the_sections(self):
        listed = re.findall(r"^\s+(\d+)\. ([A-Z][A-Z0-9 -]+?)(?:  |$)", ast.get_docstring(self.tree), re.M)
        self.assertEqual([(str(s.number), s.title) for s in self.sections], listed)

    def test_each_section_has_an_intro_and_a_test_class(self):
        for one in self.sections:
            intro = self.source.split("\n")[one.first + 2:one.first + 24]
            self.assertTrue(8 <= next(i for i, line in enumerate(intro) if not line.startswith("#")) <= 20, one.title)
            self.assertTrue(one.test_class in globals(), one.test_class)

    def test_what_has_one_home_is_found_nowhere_else(self):
        self.assertEqual([], self.places(r"\bprint\(|sys\.std(out|err)\.write", ["TERMINAL"]))
        self.assertEqual([], self.places(r"http\.client\.HTTPS?Conn|urlopen", ["HTTP"]))
        self.assertEqual([], self.places(r"threading\.Thread\(", ["BASICS"]))
        self.assertEqual([], self.places(r"os\.environ", ["BUILT-IN TOOLS", "TERMINAL"]))
        self.assertEqual([], self.places(r"sqlite3\.connect", ["MEMORY", "CODE INDEX"]))
        self.assertEqual([], self.places(r"^\s+global ", []))

    def test_it_stays_small_enough_to_live_in(self):
        lines = self.source.split("\n")
        self.assertLessEqual(len(lines), MAX_LINES)
        self.assertEqual([], [i + 1 for i, line in enumerate(lines) if len(line) > 100])
        self.assertLessEqual(self.source.count("except Exception"), 3)
        self.assertNotRegex(self.source, r"except\s*:")

    def test_text_is_always_read_as_utf_8(self):
        self.assertEqual([], [line for line in self.source.split("\n") if re.search(r"\bopen\(", line)
                              and not re.search(r'"[rw]b"|os\.open|encoding=|\.open\(|def open|^#', line)])

    def test_importing_it_does_nothing(self):
        code = ("import sys, os, threading\nbefore = set(os.listdir('.')); import paicli\n"
                "assert threading.active_count() == 1; assert set(os.listdir('.')) == before\n"
                "print(sorted(m for m in ('ssl', 'sqlite3', 'urllib.request', 'argparse', 'readline') if m in sys.modules))")
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "PYTHONPATH": str(HERE), "PYTHONDONTWRITEBYTECODE": "1"}
            done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, encoding="utf-8")
        self.assertRegex(done.stdout, r"^\[('ssl')?\]\n$")       # http.client itself imports ssl

    def test_a_class_never_extends_one_of_another_section(self):
        for one in self.sections:
            for node in one.nodes:
                for base in getattr(node, "bases", ()):
                    self.assertIn(getattr(base, "id", ""), one.names | {"NamedTuple", "Exception"}, node.name)

    def test_an_exercise_can_be_made_of_every_section(self):
        for one in self.sections:
            blanked = copy_of(one, lambda name: not name.endswith("__init__"))
            compile(blanked, one.slug, "exec")
            self.assertIn(f"exercise {one.number}: ", blanked)
            self.assertEqual([], [line for line in blanked.split("\n") if len(line) > 110])


# ---- 1 ---------------------------------------------------------------------------------------------

class TestBasics(Case):
    """Section 1.  One star of three."""

    def config(self, *argv, **environ):
        home = environ.pop("home", self.folder)
        return paicli.load_config(list(argv), environ, self.folder, home)

    def test_one_line_fits_on_a_line(self):
        self.assertEqual("a b", paicli.one_line("a\n  b\n"))
        self.assertEqual("abc…", paicli.one_line("abcdefg", 4))
        self.assertEqual("a web page titled 502 Bad", paicli.one_line("<html><TITLE>502\nBad</title><body>x"))
        self.assertEqual("\\x1b[2Jx", paicli.one_line("\x1b[2Jx"))

    def test_clip_keeps_head_and_tail_and_says_what_is_gone(self):
        self.assertEqual("abc", paicli.clip("abc", 3))
        clipped = paicli.clip("a" * 50 + "b" * 50, 30)
        self.assertRegex(clipped, r"^a{10}\n\[\.\.\. 70 characters left out \.\.\.\]\nb{20}$")

    def test_did_you_mean_names_what_looks_alike(self):
        self.assertEqual("; did you mean read_file?", paicli.did_you_mean("readfile", ["read_file", "x"]))
        self.assertEqual("", paicli.did_you_mean("zzz", ["read_file"]))

    def test_clean_text_is_valid_unicode(self):
        for dirty, good in (("caf\udce9", "caf\ufffd"), ("\ud83d\ude00", "😀"), ("\ud83d!", "\ufffd!"), ("你好", "你好")):
            self.assertEqual(good, paicli.clean(dirty))

    def test_visible_text_cannot_drive_a_terminal(self):
        self.assertEqual("a\\x1b[2Jb\\x0d\n\tc", paicli.visible("a\x1b[2Jb\r\n\tc".replace("\r\n", "\r\r\n")))
        self.assertEqual("x\\u202ey\\x9bz 你", paicli.visible("x\u202ey\x9bz 你"))

    def test_secrets_are_masked_wherever_they_stand(self):
        for text in ("key abcd1234.SECRET!", "Authorization: Bearer eyJhbGciOi.xyz", "http://user:pass@host/",
                     "https://serpapi.com/search?q=a&api_key=0123456789", "x-api-key: 0123456789abc"):
            masked = paicli.redact(text, ["abcd1234.SECRET"])
            self.assertIn(paicli.MASK, masked)
            self.assertNotRegex(masked, "SECRET|eyJ|pass|0123456789")
        for harmless in ("http://localhost:8080/a@b", "Bearer of news", "f'http://{user}:{pw}@{host}'", "key = 5"):
            self.assertEqual(harmless, paicli.redact(harmless, ["abcd1234.SECRET"]))

    def test_cancel_runs_its_callbacks_once(self):
        cancel, seen = paicli.Cancel(), []
        cancel.on_set(lambda: seen.append("a"))
        with cancel.on_set(lambda: seen.append("b")):
            self.assertFalse(cancel.is_set())
            cancel.check()
        cancel.set("enough")                     # b is forgotten by now
        cancel.set()
        self.assertTrue(cancel.is_set())
        self.assertEqual(["a"], seen)
        cancel.on_set(lambda: seen.append("late"))
        self.assertEqual(["a", "late"], seen)
        self.raises(paicli.Cancelled, "enough", cancel.check)
        self.raises(paicli.Cancelled, "enough", cancel.sleep, 5)
        paicli.Cancel().sleep(0)

    def test_a_job_gives_its_value_or_raises_its_error(self):
        self.assertEqual(5, paicli.Job("add", lambda a, b: a + b, 2, 3).wait())
        self.raises(ZeroDivisionError, "zero", paicli.Job("divide", lambda: 1 / 0).wait)
        self.assertNotEqual(threading.get_ident(), paicli.Job("who", threading.get_ident).wait())

    def test_waiting_for_a_job_ends_at_a_timeout_and_at_once_on_cancel(self):
        release, cancel = threading.Event(), paicli.Cancel()
        job = paicli.Job("slow", release.wait, 10)
        self.assertRaises(TimeoutError, job.wait, timeout_s=0.01)
        cancel.set("no more")
        self.raises(paicli.Cancelled, "no more", job.wait, cancel)
        release.set()
        self.assertTrue(job.wait())

    def test_functions_run_side_by_side_and_keep_their_order(self):
        barrier = threading.Barrier(3, timeout=5)     # passes only if all three run at once
        self.assertEqual([0, 1, 2], paicli.run_parallel("t", [lambda i=i: (barrier.wait(), i)[1] for i in range(3)]))
        self.assertEqual([threading.get_ident()], paicli.run_parallel("t", [threading.get_ident]))

    def test_a_write_replaces_the_whole_file_and_keeps_its_mode(self):
        path = self.write("a.txt", "old")
        os.chmod(path, 0o640)
        paicli.atomic_write(path, b"new")
        paicli.atomic_write(self.path("b.txt"), b"fresh", 0o600)
        self.assertEqual([b"new", b"fresh"], [self.bytes_of("a.txt"), self.bytes_of("b.txt")])
        self.assertEqual(["a.txt", "b.txt"], sorted(os.listdir(self.folder)))
        if POSIX:
            self.assertEqual([0o640, 0o600], [stat.S_IMODE(os.stat(self.path(n)).st_mode) for n in ("a.txt", "b.txt")])

    @unittest.skipUnless(POSIX, "a limit on file sizes")
    def test_a_full_disk_leaves_the_old_file(self):
        path = self.write("a.txt", "precious")
        code = ("import resource, signal, sys, paicli\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
                "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
                f"try: paicli.atomic_write({path!r}, b'x' * 5000)\nexcept OSError: print('told')")
        code = f"import sys; sys.path[:0] = [{os.getcwd()!r}, {str(HERE)!r}]; import test_paicli\n" + code
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertEqual(b"told", done.stdout.strip())
        self.assertEqual((b"precious", ["a.txt"]), (self.bytes_of("a.txt"), os.listdir(self.folder)))

    def test_reading_text_survives_a_bom_bad_bytes_and_no_file(self):
        self.assertEqual("k=1\r\n", paicli.read_text(self.write("a", b"\xef\xbb\xbfk=1\r\n")))
        self.assertEqual("caf\ufffd", paicli.read_text(self.write("b", b"caf\xe9")))
        self.assertEqual("", paicli.read_text(self.path("none")))

    def test_dotenv_lines_mean_what_they_mean_to_python_dotenv(self):
        text = ("A=abc#def\nB=abc #def\nC=   # only a comment\nD=\"a # b\"\nE='it\\'s # ok'\nF=\nG\n=H\n"
                "export I = x y \nX=\"line1\nline2\\t|\"\n# caf\ufffd\nJ=${A}-${NO:-d}-${HOME}\nK=\"open\nL='a\\n'\r\nA=2")
        values, bad = paicli.parse_dotenv(text, {"HOME": "/h"})
        self.assertEqual({"A": "2", "B": "abc", "C": "", "D": "a # b", "E": "it's # ok", "F": "", "I": "x y",
                          "X": "line1\nline2\t|", "J": "abc#def-d-/h", "L": "a\\n"}, values)
        self.assertEqual([8, 14], bad)
        self.assertEqual(({"GLM_API_KEY": "k"}, []), paicli.parse_dotenv("GLM_API_KEY=k\r\n"))

    def test_the_command_line_wins_then_environment_folder_home(self):
        self.write(".env", "GLM_MODEL=folder\nA=folder\nB=folder\n")
        self.write(".paicli/.env", "A=home\nB=home\nC=home\nGLM_MODEL=home\n")
        config = self.config("--level", "2", "fix", "it", "--json", A="environment", PAICLI_LEVEL="3")
        self.assertEqual(["environment", "folder", "home", "none"], [config.get(n, "none") for n in "ABCD"])
        self.assertEqual(("./.env", 2, ("fix", "it"), True, False), (
            config.settings["B"].source, config.level, config.words, config.json, config.demo))
        self.assertEqual(self.path(".paicli"), config.home)

    def test_words_after_a_command_are_its_own(self):
        self.assertEqual(("/search", "--json", "-x"), self.config("--demo", "/search", "--json", "-x").words)
        self.assertEqual(("say", "--demo"), self.config("say", "--", "--demo").words)
        self.assertEqual(("help", "version", "help"), tuple(
            self.config(a).show for a in ("--help", "--version", "-h")))

    def test_a_wrong_setting_is_named(self):
        self.raises(paicli.ConfigError, "--nonsense", self.config, "--nonsense")
        self.raises(paicli.ConfigError, "PAICLI_MAX_ROUNDS='ten' .environment.", self.config, PAICLI_MAX_ROUNDS="ten")
        self.raises(paicli.ConfigError, "level", self.config, "--level", "4")
        self.assertEqual((7, 2.5, 1, 3), (self.config(PAICLI_MAX_ROUNDS="7").max_rounds, self.config(
            PAICLI_TURN_TIMEOUT_S="2.5").turn_timeout_s, self.config().level, self.config("--yes").level))

    def test_a_folder_may_not_approve_itself(self):
        self.write(".env", "PAICLI_LEVEL=3\nPAICLI_HOME=/evil\nPAICLI_SANDBOX=./run\nGLM_MODEL=m\nbad line\n")
        config = self.config()
        self.assertEqual((1, self.path(".paicli"), "m", ""), (
            config.level, config.home, config.get("GLM_MODEL"), config.get("PAICLI_SANDBOX")))
        self.assertEqual(4, len(config.notices))
        self.assertIn("line 5", " ".join(config.notices))

    def test_keys_from_anywhere_are_secrets(self):
        self.write(".env", "GLM_API_KEY=folder-key-1\n")
        config = self.config(GLM_API_KEY="environment-key-2", SERPAPI_KEY="serp-key-33", X_API_KEY="short")
        self.assertEqual({"folder-key-1", "environment-key-2", "serp-key-33"}, set(config.secrets))

    def test_proxy_variables_are_found_in_any_case(self):
        self.assertEqual({"http": "http://low", "no": "x"}, paicli.proxies_in(
            {"http_proxy": "http://low", "HTTP_PROXY": "http://up", "NO_PROXY": "x", "https_proxy": ""}))


# ---- 2 ---------------------------------------------------------------------------------------------

class TestHttp(Case):
    """Section 2.  Three stars of three."""

    def setUp(self):
        super().setUp()
        self.client = self.http()

    def get(self, url, **options):
        with self.client.open("GET", url, **options) as reply:
            return reply.read()

    def test_json_goes_there_and_back(self):
        server = self.server(refuses(200, {"a": [1]}), refuses(200, {"b": 2}))
        self.assertEqual({"a": [1]}, self.client.json("POST", server.url + "/x?q=ä b", {"text": "\ud83d 你"}))
        self.assertEqual({"b": 2}, self.client.json("GET", server.url))
        request = server.requests[0]
        self.assertEqual(("/x?q=%C3%A4%20b", {"text": "\ufffd 你"}, "application/json"), (
            request["path"], request["body"], request["headers"]["Content-Type"]))
        self.assertRegex(request["headers"]["User-Agent"], "^paicli/")

    def test_a_connection_is_kept_and_replaced_once_when_the_server_closed_it(self):
        server = self.server(*[(200, {}, b"ok")] * 3)
        self.assertEqual([b"ok"] * 3, [self.get(server.url) for _ in range(3)])
        self.assertEqual(1, server.n_connections)
        closing = self.server((200, {"Connection": "close"}, b"1"), (200, {}, b"2"))
        self.assertEqual([b"1", b"2"], [self.get(closing.url) for _ in range(2)])

        def silently(handler):
            handler.answer(200, {}, b"3")
            handler.close_connection = True
        stale = self.server(silently, (200, {}, b"4"))
        self.assertEqual([b"3", b"4"], [self.get(stale.url) for _ in range(2)])
        self.assertEqual(2, stale.n_connections)

    def test_an_error_has_status_body_host_and_the_time_to_wait(self):
        for retry_after, seconds in (("7", 7), (email.utils.formatdate(time.time() + 60, usegmt=True), 60), ("x", None)):
            server = self.server(refuses(429, {"error": "slow"}, Retry_After=retry_after))
            error = self.raises(paicli.HttpError, "HTTP 429 from 127.0.0.1: .*slow", self.get, server.url)
            self.assertEqual((429, '{"error": "slow"}'), (error.status, error.body))
            self.assertEqual(seconds, error.retry_after_s and round(error.retry_after_s, -1 if seconds == 60 else 0))

    def test_what_is_no_answer_is_said_in_words(self):
        self.raises(paicli.HttpError, "connection refused", self.get, "http://127.0.0.1:1/")
        self.raises(paicli.HttpError, "not an http", self.get, "file:///etc/passwd")
        self.raises(paicli.HttpError, "not a URL", self.get, "http://[::1/")
        html = self.server((200, {}, b"<html><title>Login</title>"))
        self.raises(paicli.HttpError, "web page titled Login", self.client.json, "GET", html.url)
        moved = self.server((301, {"Location": "http://x/"}, b""))
        self.raises(paicli.HttpError, "moved to http://x/", self.get, moved.url)
        cut = self.server((200, {"Content-Length": "10"}, b"123"))
        cut.script[0] = lambda h: (h.answer(200, {"Content-Length": "10"}, b"123"), setattr(h, "close_connection", True))
        self.raises(paicli.HttpError, "broke off", self.get, cut.url)

    def test_silence_is_waited_for_only_so_long(self):
        server = self.server(streams_then_waits())
        self.raises(paicli.HttpError, "no answer in time", self.get, server.url, timeout_s=0.05)

    def test_cancel_ends_a_read_and_a_connect_at_once(self):
        server = self.server(streams_then_waits("1"))
        cancel = paicli.Cancel()
        job = paicli.Job("get", lambda: self.get(server.url, cancel=cancel))
        self.assertTrue(wait_for(lambda: server.requests))
        cancel.set("stop")
        self.assertRaises(paicli.Cancelled, job.wait, timeout_s=5)
        full = socket.socket()                   # accepts nothing: connecting to it hangs
        self.stack.callback(full.close)
        full.bind(("127.0.0.1", 0))
        self.assertRaises(paicli.Cancelled, self.get, f"http://127.0.0.1:{full.getsockname()[1]}", cancel=cancel)

    def test_server_sent_events_are_parsed_as_the_standard_says(self):
        # The examples of https://html.spec.whatwg.org/multipage/server-sent-events.html
        parse = lambda text: list(paicli.sse_events(io.BytesIO(text.encode("utf-8"))))
        self.assertEqual([("message", "YHOO\n+2\n10")], parse("data: YHOO\ndata: +2\ndata: 10\n\n"))
        self.assertEqual([("message", "first event"), ("message", "second event"), ("message", " third event")],
                         parse(": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n"))
        self.assertEqual([("add", "73857293"), ("message", "x")], parse("event: add\rdata: 73857293\r\n\r\n\ufeffdata: y\ndata: x\n\n"))
        self.assertEqual([("message", ""), ("message", "\n")], parse("\ufeffdata\n\ndata\ndata\n\n"))
        self.assertEqual([("message", "a\u2028b")], parse("data: a\u2028b\n"))

    def test_a_stream_is_read_event_by_event_and_the_connection_kept(self):
        server = self.server(sse("1", "2"), (200, {}, b"ok"))
        with self.client.open("POST", server.url, b"{}") as reply:
            self.assertEqual((200, ["1", "2"]), (reply.status, [d for _, d in reply.events()][:2]))
        self.assertEqual((b"ok", 1), (self.get(server.url), server.n_connections))

    def test_a_reply_is_json_or_an_error_that_shows_it(self):
        with self.client.open("GET", self.server((200, {}, b'{"a": 1}')).url) as reply:
            self.assertEqual({"a": 1}, reply.json())
        with self.client.open("GET", self.server((200, {}, b"")).url) as reply:
            self.raises(paicli.HttpError, "empty answer", reply.json)

    def test_a_proxy_is_used_unless_the_host_needs_none(self):
        proxy = self.server(*[(200, {}, b"by proxy")] * 2)
        self.client.proxies = {"http": f"http://user:p%40ss@127.0.0.1:{proxy.port}", "https": "http://up:3128",
                             "no": "inside.example,.corp"}
        self.assertEqual(b"by proxy", self.get("http://outside.example:81/a?b"))
        request = proxy.requests[0]
        self.assertEqual("http://outside.example:81/a?b", request["path"])
        self.assertEqual("Basic " + base64.b64encode(b"user:p@ss").decode(), request["headers"]["Proxy-Authorization"])
        for url in ("http://localhost/", "http://127.0.0.2/", "http://[::1]/", "http://inside.example/", "http://x.corp/"):
            self.assertIsNone(self.client.route(url).proxy, url)
        self.assertEqual("up", self.client.route("https://outside.example/").proxy.hostname)
        self.assertNotEqual(self.client.route("http://a.example/").key, self.client.route("http://b.example/").key)
        self.client.proxies = {"http": f"http://user:secret@127.0.0.1:1"}
        error = self.raises(paicli.HttpError, "through the proxy 127.0.0.1:1", self.get, "http://outside.example/")
        self.assertNotIn("secret", str(error))

    def test_https_goes_through_a_proxy_by_connect(self):
        seen = []
        proxy = self.server(lambda h: (seen.append((h.path, h.headers["Proxy-Authorization"])), h.answer(407, {}, b"")))
        self.client.proxies = {"https": f"http://me:pw@127.0.0.1:{proxy.port}"}
        self.raises(paicli.HttpError, "407", self.get, "https://outside.example/")
        self.assertEqual([("outside.example:443", "Basic bWU6cHc=")], seen)
        self.assertEqual({}, paicli.proxy_login(paicli.urllib.parse.urlsplit("http://host:1")))

    def test_loopback_is_this_machine_only(self):
        self.assertEqual([True] * 4 + [False] * 3, [paicli.is_loopback(h) for h in (
            "localhost", "127.0.0.1", "::1", "a.localhost", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1")])

    def test_bytes_of_json_are_utf_8_without_lone_surrogates(self):
        self.assertEqual('{"a": "你\ufffd"}'.encode("utf-8"), paicli.json_bytes({"a": "你\udce9"}))
        self.assertEqual(b"[1, null]", paicli.json_bytes([1, None]))

    def test_retry_waits_longer_each_time_and_gives_up(self):
        cancel, told = FakeCancel(), []
        errors = [paicli.HttpError(500, ""), paicli.HttpError(429, "", "", 9.0)]
        attempt = lambda: "done" if not errors else self.fail_with(errors.pop())
        self.assertEqual("done", paicli.retry(attempt, lambda e: True, cancel, lambda e, s: told.append((e.status, s))))
        self.assertEqual([429, 500], [status for status, _ in told])
        self.assertEqual(9.0, cancel.slept[0])
        cancel.slept.clear()
        self.assertRaises(paicli.HttpError, paicli.retry, lambda: self.fail_with(paicli.HttpError(500, "")),
                          lambda e: True, cancel, lambda e, s: None)
        self.assertEqual(4, len(cancel.slept))
        for waited, most in zip(cancel.slept, (0.5, 1, 2, 4)):
            self.assertTrue(0.75 * most <= waited <= most)

    def test_retry_leaves_alone_what_will_not_change(self):
        cancel = FakeCancel()
        for error, is_temporary in ((paicli.HttpError(429, "", "", 500), True), (paicli.HttpError(400, ""), False)):
            self.assertRaises(paicli.HttpError, paicli.retry, lambda: self.fail_with(error), lambda e: is_temporary,
                              cancel, lambda e, s: None)
        self.assertEqual([], cancel.slept)

    def fail_with(self, error):
        raise error

    def test_closing_ends_the_kept_connections(self):
        server = self.server((200, {}, b"1"), (200, {}, b"2"))
        self.get(server.url)
        self.client.close()
        self.get(server.url)
        self.assertEqual((2, 2), (server.n_connections, self.client.n_connections))


# ---- 3 ---------------------------------------------------------------------------------------------

class TestModel(Case):
    """Section 3.  Three stars of three."""

    def ask(self, *script, messages=None, tools=(), provider="glm", cancel=None, **options):
        """Ask a ChatModel on a scripted server; self.deltas has what was streamed."""
        server = self.asked = self.server(*script)
        endpoint = paicli.Endpoint(provider, server.url, "glm-5.1", "key-1234", paicli.PROVIDERS[provider])
        self.deltas, self.cancel = [], cancel or FakeCancel()
        chat = paicli.ChatModel(self.http(), endpoint, **options)
        return chat.reply(messages or [{"role": "user", "content": "hi"}], list(tools),
                          lambda kind, text: self.deltas.append((kind, text)), self.cancel)

    def built(self, *events):
        builder = paicli.ReplyBuilder(lambda kind, text: None)
        for event in events:
            builder.add(json.loads(event))
        return builder.reply("prompt")

    def joined(self, *pieces):
        """[(id, name, arguments)] that a builder makes of tool-call fragments, one event each."""
        reply = self.built(*[chunk(calls=p if isinstance(p, list) else [p]) for p in pieces])
        return [(c.id, c.name, c.arguments) for c in reply.tool_calls]

    def test_a_text_comes_in_deltas_and_as_a_whole(self):
        reply = self.ask(sse(chunk("Hel"), chunk("lo"), chunk(finish="stop", usage={
            "prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 80}})))
        self.assertEqual(paicli.Reply("Hello", "", [], paicli.Usage(100, 2, 80), "stop"), reply)
        self.assertEqual([("text", "Hel"), ("text", "lo")], self.deltas)
        request = self.asked.requests[0]
        self.assertEqual(("/chat/completions", "Bearer key-1234", "glm-5.1", True), (
            request["path"], request["headers"]["Authorization"], request["body"]["model"], request["body"]["stream"]))
        self.assertNotIn("stream_options", request["body"])
        self.ask(says("x"), provider="openai", tools=[{"type": "function"}])
        self.assertEqual(({"include_usage": True}, [{"type": "function"}]), (
            self.asked.requests[0]["body"]["stream_options"], self.asked.requests[0]["body"]["tools"]))

    def test_reasoning_is_told_apart_whatever_its_name(self):
        for name in ("reasoning_content", "reasoning"):
            reply = self.built(chunk(**{name: "think"}), chunk("x", reasoning_content="A", reasoning="A"))
            self.assertIn(reply.reasoning, ("thinkA",))
            self.assertEqual("x", reply.text)

    def test_tool_calls_are_joined_whatever_the_server_does_to_index_and_id(self):
        a, b = ("a", "f", '{"x": 1}'), ("b", "g", '{"y": 2}')
        first, rest = '{"x"', ": 1}"
        for pieces in (
                [piece(0, "a", "f", first), piece(0, None, None, rest), piece(1, "b", "g", b[2])],           # OpenAI
                [piece(None, "a", "f", first), piece(None, None, None, rest), piece(None, "b", "g", b[2])],   # no index
                [piece(0, "a", "f", first), piece(None, None, None, rest), piece(None, "b", "g", b[2])],      # index once
                [piece(0, "a", "f", a[2]), piece(0, "b", "g", b[2])],                                         # all 0: Ollama
                [[piece(0, "a", "f", first), piece(1, "b", "g", '{"y"')],
                 [piece(1, None, None, ": 2}"), piece(0, None, None, rest)]],                                # interleaved
                [piece(0, "a", "f", first), piece(7, None, None, rest), piece(8, "b", "g", b[2])],            # odd index
                [piece(0, "a", "f", first), piece(0, "a2", None, rest), piece(1, "b", "g", b[2])],            # new id each
                [piece(0, "a", "f", first), piece(0, "a", "f", rest), piece(1, "b", "g", b[2])],              # name again
                [piece(1, "b", "g", b[2]), piece(0, "a", "f", a[2])],                                         # out of order
                [piece(0, "a", "f", {"x": 1}), piece(1, "b", "g", {"y": 2})]):                                # objects
            self.assertEqual([a, b], self.joined(*pieces), pieces)

    def test_missing_and_repeated_ids_become_unique(self):
        for ids in ((None, None), ("", ""), ("same", "same")):
            found = self.joined(piece(0, ids[0], "f", "{}"), piece(1, ids[1], "g", "{}"))
            self.assertEqual(["f", "g"], [name for _, name, _ in found])
            self.assertEqual(2, len({id_ for id_, _, _ in found if id_}))
        self.assertEqual(["f", "f"], [n for _, n, _ in self.joined(piece(0, None, "f", "{}"), piece(0, None, "f", "{}"))])

    def test_chunks_without_sense_pass_by_and_the_last_usage_counts(self):
        usage = {"prompt_tokens": 5, "completion_tokens": 1}
        reply = self.built('{"id": "x"}', '{"choices": null}', '{"choices": [{"index": 0, "delta": null}]}',
                           chunk("hi", usage={"prompt_tokens": 5, "completion_tokens": 0}),
                           '{"choices": [{"delta": {}, "finish_reason": "end", "usage": %s}]}' % json.dumps(usage),
                           '{"choices": [], "usage": %s}' % json.dumps(usage))
        self.assertEqual(("hi", paicli.Usage(5, 1), "end"), (reply.text, reply.usage, reply.finish))
        self.assertEqual(paicli.Usage(2, 1, 0, True), self.built(chunk("hi")).usage)
        self.assertEqual("ab", self.built(chunk([{"type": "text", "text": "ab"}])).text)
        self.assertEqual("😀", self.built('{"choices": [{"delta": {"content": "\\ud83d"}}]}',
                                         '{"choices": [{"delta": {"content": "\\ude00"}}]}').text)

    def test_an_answer_in_one_piece_is_understood_too(self):
        reply = self.ask(refuses(200, {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}, "finish_reason": "tool_calls"}]}))
        self.assertEqual([paicli.ToolCall("a", "f", "{}")], reply.tool_calls)

    def test_arguments_are_unwrapped_but_never_repaired(self):
        for text in ('{"path": "a"}', '"{\\"path\\": \\"a\\"}"', json.dumps(json.dumps(json.dumps({"path": "a"})))):
            self.assertEqual({"path": "a"}, paicli.parse_arguments(text))
        self.assertEqual([{}, {"t": "a\nb"}, {"p": "C:\\Users\\unicorn\\new"}], [paicli.parse_arguments(t) for t in (
            " ", '{"t": "a\nb"}', '{"p": "C:\\\\Users\\\\unicorn\\\\new"}')])
        for text, why in (('{"path": "a', "cut off"), ('{"a": 1}{"b": 2}', "not valid"), ("[1]", "should be a JSON object"),
                          ('{"p": "C:\\Users\\unicorn"}', "not valid"), ("[" * 100000, "not valid"), ('"x"', "not valid")):
            self.raises(paicli.ToolError, why, paicli.parse_arguments, text)

    def test_the_history_is_sent_as_each_provider_wants_it(self):
        reply = paicli.Reply("", "think A", [call("f", "{broken"), call("google:f $", '"{}"', "c2")])
        message = paicli.assistant_message(reply)
        self.assertEqual([("f", "{}"), ("google_f__", "{}")], [
            (c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]])
        history = [{"role": "user", "content": "q", "id": 1, "created_at": "now"}, {"role": "assistant", "content": ""}, message]
        glm, openai, ollama = (paicli.wire_messages(history, paicli.PROVIDERS[p]) for p in ("glm", "openai", "ollama"))
        self.assertEqual({"role": "user", "content": "q"}, glm[0])
        self.assertEqual([2, "think A", "", None, ""], [len(glm), glm[1].get("reasoning_content"), glm[1]["content"],
                                                       openai[1]["content"], ollama[1]["content"]])
        self.assertNotIn("reasoning_content", openai[1])

    def test_a_stream_that_breaks_off_is_asked_for_again(self):
        for broken in (sse(chunk("The answer is"), done=False), sse(chunk(calls=[piece(0, "a", "f", "{")]), done=False),
                       sse(chunk("x"), done=False, cut=b'data: {"choi'), (200, {}, b"")):
            self.assertEqual("whole", self.ask(broken, says("whole")).text)
            self.assertIn("retry", [kind for kind, _ in self.deltas])
        for complete in (sse(chunk("x", finish="stop"), done=False), sse(chunk("x"))):
            self.assertEqual("x", self.ask(complete).text)

    def test_an_error_inside_a_stream_is_an_error(self):
        for entry in (sse(chunk("Par"), '{"choices": [], "error": {"code": 502, "message": "limit reached"}}'),
                      sse('{"error": {"code": "1302", "message": "limit reached"}}'),
                      refuses(200, {"error": {"code": 500, "message": "limit reached"}}), sse(chunk("x", finish="error"))):
            self.assertEqual("then", self.ask(entry, says("then")).text)
        self.raises(paicli.ModelError, "bad parameter", self.ask, sse('{"error": {"code": "1210", "message": "bad parameter"}}'))

    def test_what_will_not_change_is_not_asked_again(self):
        for status, body, said in ((429, {"error": {"code": "1113", "message": "余额不足"}}, "glm-coding"),
                                   (401, {"error": {"message": "invalid key"}}, "GLM_API_KEY"),
                                   (400, [{"error": {"message": "Gemini's list"}}], "Gemini's list"),
                                   (429, {"error": {"code": "insufficient_quota", "message": "pay"}}, "pay"),
                                   (404, "<title>Not here</title>", "Not here")):
            self.raises(paicli.ModelError, said, self.ask, refuses(status, body), says("no"))
            self.assertEqual([], self.cancel.slept)
        self.raises(paicli.ModelError, "web page titled Login", self.ask, (200, {"Content-Type": "text/html"}, b"<title>Login</title>"))

    def test_a_busy_server_is_asked_again_after_the_time_it_wants(self):
        reply = self.ask(refuses(429, {"error": {"code": "1302", "message": "busy"}}, Retry_After="3"),
                         refuses(503, "<title>Down</title>"), refuses(429, {"error": {"message": "too many tokens per min"}}), says("ok"))
        self.assertEqual(("ok", 3.0, 3), (reply.text, self.cancel.slept[0], len(self.cancel.slept)))
        self.raises(paicli.ModelError, "busy", self.ask, *[refuses(500, {"error": {"message": "busy"}})] * 5)

    def test_a_conversation_too_long_has_one_code_in_all_its_forms(self):
        usage = {"prompt_tokens": 230000, "completion_tokens": 1}
        for entry in (sse(chunk("", finish="model_context_window_exceeded")), refuses(400, {"error": {"code": "1261", "message": "x"}}),
                      refuses(400, {"error": {"message": "This model's maximum context length is 8192 tokens"}}),
                      sse(chunk("x", finish="stop", usage=usage))):
            self.assertEqual("overflow", self.raises(paicli.ModelError, "longer than", self.ask, entry, says("no")).code)
        self.assertEqual("x", self.ask(sse(chunk("x", finish="stop", usage=usage)), window=300000).text)
        self.assertEqual((200000, 204800, 131072, 0), tuple(map(paicli.context_window, ("z-ai/glm-5.1", "glm-4.7", "glm-4.5-air", "x"))))

    def test_output_used_up_by_thinking_is_asked_for_once_without(self):
        thought = sse(chunk(reasoning_content="...", finish="length"))
        self.assertEqual("short", self.ask(thought, says("short")).text)
        self.assertEqual({"type": "disabled"}, self.asked.requests[1]["body"]["thinking"])
        self.raises(paicli.ModelError, "thinking", self.ask, thought, thought)

    def test_cancel_ends_a_stream_at_once(self):
        cancel = paicli.Cancel()
        job = paicli.Job("ask", lambda: self.ask(streams_then_waits(chunk("Hel")), cancel=cancel))
        self.assertTrue(wait_for(lambda: getattr(self, "deltas", [])))
        cancel.set()
        self.assertRaises(paicli.Cancelled, job.wait, timeout_s=5)

    def test_trace_shows_request_and_reply(self):
        seen = []
        self.ask(says("x"), on_trace=lambda kind, body: seen.append((kind, body)))
        self.assertEqual([("request", "hi"), ("reply", "x")], [
            (kind, body.get("content") or body["messages"][0]["content"]) for kind, body in seen])

    def test_tokens_add_up(self):
        self.assertEqual(paicli.Usage(5, 7, 9, True), paicli.Usage(1, 2, 3).plus(paicli.Usage(4, 5, 6, True)))
        self.assertEqual((0, 1, 2), tuple(map(paicli.estimate_tokens, ("", "abcd", "你好"))))

    def choose(self, choice="", argv=(), **environ):
        config = paicli.load_config(list(argv), environ, self.folder, self.folder)
        return paicli.choose_endpoint(config, choice)

    def test_a_provider_is_its_url_model_and_key(self):
        chosen = self.choose(GLM_API_KEY="k" * 9)
        self.assertEqual(("glm", "https://open.bigmodel.cn/api/paas/v4", "glm-5.1", "k" * 9), chosen[:4])
        chosen = self.choose("deepseek:other", DEEPSEEK_API_KEY="d" * 9, DEEPSEEK_BASE_URL="https://mine.example/v1/")
        self.assertEqual(("deepseek", "https://mine.example/v1", "other", "d" * 9), chosen[:4])
        self.assertEqual("m", self.choose(PAICLI_MODEL="openai:m").model)
        self.assertEqual("glm-4.7", self.choose("glm", GLM_MODEL="glm-4.7").model)
        self.assertIn("/coding/", self.choose("glm-coding", GLM_API_KEY="k").base_url)
        self.raises(paicli.ConfigError, "no provider 'nobody'", self.choose, "nobody")
        self.raises(paicli.ConfigError, "GLM_API_KEY", self.choose, GLM_API_KEY="a b")

    def test_a_key_goes_only_where_it_belongs(self):
        key = {"GLM_API_KEY": "k" * 9}
        self.assertEqual("k" * 9, self.choose("https://open.bigmodel.cn/api/paas/v4#glm-4.7", **key).api_key)
        for url in ("https://evil.example/open.bigmodel.cn/api/paas/v4", "https://open.bigmodel.cn.evil.example/",
                    "https://open.bigmodel.cn@evil.example/", "http://open.bigmodel.cn/", "http://127.0.0.1:9/v1"):
            self.assertEqual(("", "m"), (self.choose(url + "#m", **key).api_key, self.choose(url + "#m", **key).model), url)

    def test_a_folder_can_not_redirect_the_key(self):
        self.write(".env", "GLM_BASE_URL=https://evil.example/v1\n")
        for environ in ({"GLM_API_KEY": "k" * 9}, {}):
            chosen = self.choose(**environ)
            self.assertEqual(("https://open.bigmodel.cn/api/paas/v4", True), (chosen.base_url, "evil.example" in chosen.notice))
        self.write(".env", "GLM_BASE_URL=https://evil.example/v1\nGLM_API_KEY=theirs\nPAICLI_MODEL=https://evil.example/v1#m\n")
        self.raises(paicli.ConfigError, "trust", self.choose)
        self.assertEqual(("https://open.bigmodel.cn/api/paas/v4", ""), self.choose("glm")[1:4:2])
        self.write(".env", "GLM_BASE_URL=http://localhost:1/v1\n")
        self.assertEqual("http://localhost:1/v1", self.choose().base_url)
        self.assertIn("set both in one place", self.choose(GLM_API_KEY="k" * 9).notice)

    def test_without_a_key_it_says_how_to_get_going(self):
        chat = paicli.ChatModel(self.http(), self.choose())
        self.raises(paicli.ConfigError, "GLM_API_KEY(.|\n)*ollama(.|\n)*--demo", chat.reply, [], [], None, paicli.Cancel())

    def test_ollama_is_found_by_what_it_serves(self):
        server = self.server(refuses(200, {"models": [{"name": "qwen3:4b"}, {"name": "x"}]}), refuses(200, []))
        self.assertEqual([["qwen3:4b", "x"], [], []], [paicli.find_ollama(self.http(), u) for u in (
            server.url, server.url, "http://127.0.0.1:1")])

    def test_errors_of_the_server_keep_their_code(self):
        endpoint = self.choose()
        error = paicli.model_error(500, {"error": {"code": "x1", "message": "m" * 900}}, endpoint, 4)
        self.assertEqual(("x1", True, 4), (error.code, error.is_temporary, error.retry_after_s))
        self.assertLess(len(str(error)), 600)
        self.assertFalse(paicli.model_error(400, "text", endpoint).is_temporary)

    def test_the_demo_model_plays_the_tutorial(self):
        model, messages = paicli.DemoModel(), []
        for result, expected in (("", "create_project"), ("Project created: demo", "Maven")):
            messages += [{"role": "tool", "content": result}] if result else [
                {"role": "user", "content": "create a java project demo"}]
            reply = model.reply(messages, [], lambda kind, text: None, paicli.Cancel())
            self.assertIn(expected, reply.text + "".join(c.name for c in reply.tool_calls))
        failed = [{"role": "user", "content": "list x"}, {"role": "tool", "content": "Error: no x"}]
        self.assertIn("did not work", model.reply(failed, [], lambda kind, text: None, paicli.Cancel()).text)
        helped = model.reply([{"role": "user", "content": "hello"}], [], lambda kind, text: None, paicli.Cancel())
        self.assertIn("no intelligence", helped.text)
