"""Just enough MCP over HTTP to run the auth/* conformance scenarios with oauth.py: driver.py URL"""
import json
import os
import sys
import tempfile
import urllib.parse

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import oauth
import paicli

VERSION = os.environ.get("MCP_CONFORMANCE_PROTOCOL_VERSION", "2025-11-25")
SCENARIO = os.environ.get("MCP_CONFORMANCE_SCENARIO", "")
CONTEXT = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT") or "{}")
IS_MODERN = VERSION >= "2026"
META = {"io.modelcontextprotocol/protocolVersion": VERSION,
        "io.modelcontextprotocol/clientCapabilities": {},
        "io.modelcontextprotocol/clientInfo": {"name": "paicli", "version": "0"}}
MAX_TRIES = 4


def follow(http):
    """The person of these tests: takes the redirect instead of a browser."""
    def authorize(page, cancel):
        try:
            with http.open("GET", page, cancel=cancel) as reply:
                raise paicli.PaiError("no redirect: " + reply.read().decode())
        except paicli.HttpError as e:
            if not 300 <= e.status < 400:
                raise
            return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(e.headers["Location"]).query))
    return authorize


class Client:
    def __init__(self, url, auth, http):
        self.url, self.auth, self.http, self.id, self.session = url, auth, http, 0, {}

    def send(self, method, params=None, is_notification=False):
        body = {"jsonrpc": "2.0", "method": method, "params": params or {}}
        if IS_MODERN:
            body["params"]["_meta"] = META
        if not is_notification:
            self.id += 1
            body["id"] = self.id
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", **self.session}
        if IS_MODERN:
            headers.update({"MCP-Protocol-Version": VERSION, "Mcp-Method": method})
            if method == "tools/call":
                headers["Mcp-Name"] = params["name"]
        cancel = paicli.Cancel()
        for n in range(MAX_TRIES):
            token = self.auth.header(self.url)
            try:
                with self.http.open("POST", self.url, json.dumps(body).encode(),
                                    {**headers, **({"Authorization": token} if token else {})}) as reply:
                    if reply.headers.get("Mcp-Session-Id"):
                        self.session["Mcp-Session-Id"] = reply.headers["Mcp-Session-Id"]
                    if is_notification:
                        return None
                    if "event-stream" in reply.headers.get("Content-Type", ""):
                        for _, data in reply.events():
                            message = json.loads(data)
                            if message.get("id") == body["id"]:
                                break
                    else:
                        message = reply.json()
                if "error" in message:
                    raise paicli.PaiError(json.dumps(message["error"]))
                return message["result"]
            except paicli.HttpError as e:
                challenge = ", ".join(e.headers.get_all("WWW-Authenticate", [])) if e.headers else ""
                print(method, e.status, challenge, e.body[:200], file=sys.stderr)
                if e.status not in (401, 403) or n == MAX_TRIES - 1 or not self.auth.on_refusal(
                        self.url, e.status, challenge, cancel):
                    raise


def main(url):
    http = paicli.Http()
    settings = {"clientMetadataUrl": "https://conformance-test.local/client-metadata.json"}
    for name, key in (("clientId", "client_id"), ("clientSecret", "client_secret")):
        if CONTEXT.get(key):
            settings[name] = CONTEXT[key]
    if "client-credentials" in SCENARIO:
        settings["grantType"] = "client_credentials"
    with tempfile.TemporaryDirectory() as folder:
        auth = oauth.OAuth(http, os.path.join(folder, "mcp-auth.json"), {url: settings}, follow(http))
        client = Client(url, auth, http)
        if IS_MODERN:
            client.send("server/discover")
        else:
            client.send("initialize", {"protocolVersion": VERSION, "capabilities": {},
                                       "clientInfo": {"name": "paicli", "version": "0"}})
            client.session["MCP-Protocol-Version"] = VERSION
            client.send("notifications/initialized", is_notification=True)
        tools = client.send("tools/list")["tools"]
        if tools:
            client.send("tools/call", {"name": tools[0]["name"], "arguments": {}})


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except paicli.PaiError as e:
        sys.exit(f"{type(e).__name__}: {e}")
