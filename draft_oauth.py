from __future__ import annotations

import base64
import collections
import contextlib
import json
import os
import re
import socket
import threading
import urllib.parse
from typing import Callable

from paicli import Cancel, Http, HttpError, PaiError, atomic_write, json_bytes, read_text


# =============================================================================
# 20. OAUTH
# =============================================================================
# A server that answers 401 wants a token, and the way to one is a chain of documents:
#
#     401 --> its resource metadata --> its issuer's metadata --> a client id --> browser --> token
#
# In: the URL and WWW-Authenticate of what was refused.  Out: a better header, if there is one.
# Trap: strangers wrote all of it.  The resource must be the server itself; the issuer must be the
# one that was named, also when it answers; what one issuer gave is never shown to another.
# "oauth" in mcp.json may have clientId, clientSecret, clientMetadataUrl, callbackPort, grantType.
# Simplified: one browser at a time; tokens are renewed when refused, not before; never revoked.
# Tests: TestOauth (exercise, 3 of 3 stars).  Source: modelcontextprotocol.io, Authorization.

LOGIN_TIMEOUT_S = 300                    # a person looks for a password
DOCUMENT_TIMEOUT_S = 10
CALLBACK_PORT = 47116                    # fixed, as some issuers compare it
CLIENT_AUTH = ("client_secret_basic", "client_secret_post", "none")      # the first that is offered


def parse_challenge(www_authenticate: str | None) -> dict:
    """Return a header's Bearer part: 'Bearer scope="a b", error=x' -> {"scope": "a b", ...}."""
    bearer = re.sub("(?is)^.*?bearer ", "", www_authenticate or "", count=1)
    pairs = re.findall(r'([\w-]+)\s*=\s*(?:"([^"]*)"|([^\s,"]+))', bearer)
    return {name.lower(): quoted or plain for name, quoted, plain in pairs}


def choose_scope(before: str, challenge: dict, resource: dict, issuer: dict) -> str:
    """Return what was asked for before and what is missing, or else all the resource has."""
    asked = f"{before} {challenge.get('scope', '')}".split() or resource.get("scopes_supported", [])
    asked = [scope for scope in asked if scope != "offline_access"]
    if asked and "offline_access" in issuer.get("scopes_supported", []):
        asked.append("offline_access")                    # it gives a refresh token
    return " ".join(dict.fromkeys(asked))


def well_known(url: str, name: str) -> str:
    """Return where a document about a URL is: https://a.b/c -> https://a.b/.well-known/NAME/c."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}/.well-known/{name}{parts.path.rstrip('/')}"


def _endpoint(issuer, name):
    """-> a URL that may get secrets, or be opened in a browser: https, or on this machine."""
    url = str(issuer.get(name))
    if not re.fullmatch(r"(https://|http://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?/)[!-~]*", url):
        raise PaiError(f"{issuer['issuer']} has no safe {name}: {url}")
    return url


class OAuth:
    """The tokens of all MCP servers: sent with requests, renewed when a server refuses one."""

    def __init__(self, http: Http, path: str, settings: dict, authorize: Callable | None):
        self.settings = settings         # URL -> "oauth" of that server in mcp.json
        self.authorize = authorize       # (page, cancel) -> parameters of the URL it leads to
        self._http, self._path = http, path
        self._renewing = collections.defaultdict(threading.Lock)         # URL -> its lock
        self._records = {}               # URL -> {issuer, client, resource, scope, token}
        self._lock = threading.Lock()    # held while the records change
        self._load()

    def header(self, url: str) -> str | None:
        """Return the Authorization for requests to this server, None without a token."""
        token = self._records.get(url, {}).get("token")
        return token and "Bearer " + token["access_token"]

    def on_refusal(self, url: str, status: int, www_authenticate: str, cancel: Cancel) -> bool:
        """Get a better token, True if the request may now pass.  Raises PaiError, Cancelled."""
        challenge, refused = parse_challenge(www_authenticate), self.header(url)
        if status != 401 and challenge.get("error") != "insufficient_scope":
            return False
        with self._renewing[url]:        # those refused at the same time share one login
            cancel.check()
            self._load()                 # another process may have been faster
            try:
                return self.header(url) != refused or self._renew(url, challenge, cancel)
            except (AttributeError, LookupError, TypeError, ValueError) as e:
                raise PaiError(f"{url} wants a login that makes no sense: {e!r}") from e

    def logout(self, url: str) -> None:
        """Forget a server's token, and who we were there."""
        self._save(url, {})

    def _load(self):
        with contextlib.suppress(ValueError, TypeError):  # no file yet, or a damaged one
            self._records.update(json.loads(read_text(self._path)))

    def _save(self, url, record):
        with self._lock, contextlib.suppress(OSError):    # a full disk: then for this run only
            self._load()
            self._records[url] = record
            atomic_write(self._path, json_bytes(self._records), 0o600)

    def _renew(self, url, challenge, cancel):
        """-> True with a better token saved, False if there is nothing better to ask for."""
        resource, issuer = self._discover(url, challenge, cancel)
        settings, record = self.settings.get(url, {}), self._records.get(url, {})
        name, why = issuer["issuer"], "it registers none"
        if record.get("issuer", name) != name:
            if "clientId" in settings:                    # that secret is not for everybody
                raise PaiError(f"{url} moved its login to {name}: /mcp logout, if you trust that")
            record = {}
        before = record.get("scope", "")
        scope = choose_scope(before, challenge, resource, issuer)
        if challenge.get("error") == "insufficient_scope":
            if record and scope == before:
                return False
            record = {**record, "token": {}}              # to refresh it gives no more rights
        asked = {"resource": resource["resource"], **({"scope": scope} if scope else {})}
        for client, fields in self._ways(issuer, record, settings, scope, cancel):
            try:
                if "client_id" not in client:
                    client = {**client, **self._http.json(
                        "POST", _endpoint(issuer, "registration_endpoint"), client, None, cancel)}
                fields = fields or self._ask(issuer, client, asked, cancel)
                token = self._token(issuer, client, {**asked, **fields}, cancel)
            except PaiError as e:
                if "_client" not in str(e) and not 400 <= getattr(e, "status", 0) < 500:
                    raise
                why = e
            else:
                token["refresh_token"] = token.get("refresh_token") or fields.get("refresh_token")
                self._save(url, {**asked, "issuer": name, "client": client, "token": token})
                return True
        raise PaiError(f"{name} takes no client of ours ({why}): set oauth.clientId in mcp.json")

    def _discover(self, url, challenge, cancel):
        """-> (metadata of the resource, metadata of its issuer), both checked."""
        own, root = re.sub("/*([?#].*)?$", "", url), urllib.parse.urljoin(url, "/")
        places = [well_known(place, "oauth-protected-resource") for place in (own, root)]
        resource = self._first([challenge.get("resource_metadata", places[0]), *places], cancel)
        resource = {"resource": own, "authorization_servers": [root], **resource}
        if not f"{own}/".startswith(resource["resource"].rstrip("/") + "/"):
            raise PaiError(f"{url} wants a token for {resource['resource']}: that is not itself")
        name = resource["authorization_servers"][0]
        issuer = self._first([well_known(name, "oauth-authorization-server"),
                              well_known(name, "openid-configuration"),
                              name.rstrip("/") + "/.well-known/openid-configuration"], cancel)
        if issuer.get("issuer", "").rstrip("/") != name.rstrip("/"):     # some SDKs add the slash
            raise PaiError(f"{url} needs a login, but {name} says it is {issuer.get('issuer')}; "
                           'if you have a token, set "headers" in mcp.json')
        return resource, issuer

    def _first(self, places, cancel):
        """-> the first of these documents that there is, {} if there is none."""
        for place in dict.fromkeys(places):
            with contextlib.suppress(HttpError):
                found = self._http.json("GET", place, None, None, cancel, DOCUMENT_TIMEOUT_S)
                return {name: value for name, value in found.items() if value is not None}
        return {}

    def _ways(self, issuer, record, settings, scope, cancel):
        """Yield (client, fields for the token endpoint, {} to ask the person), quietest first."""
        refresh = record.get("token", {}).get("refresh_token")
        if refresh:
            yield record["client"], {"grant_type": "refresh_token", "refresh_token": refresh}
        fields = {"grant_type": settings["grantType"]} if "grantType" in settings else {}
        offered = issuer.get("token_endpoint_auth_methods_supported", CLIENT_AUTH)
        auth = next((a for a in CLIENT_AUTH if a in offered), "none")
        port = settings.get("callbackPort", CALLBACK_PORT)
        client = {"client_name": "PaiCLI", "application_type": "native",
                  "redirect_uris": [f"http://127.0.0.1:{port}/callback"],
                  "grant_types": ["authorization_code", "refresh_token"],
                  "token_endpoint_auth_method": auth,
                  **({"scope": scope} if scope else {})}
        if "clientId" in settings:
            yield {**client, "client_id": settings["clientId"],
                   "client_secret": settings.get("clientSecret", "")}, fields
            return
        if "client" in record:
            yield record["client"], fields
        if issuer.get("client_id_metadata_document_supported") and "clientMetadataUrl" in settings:
            yield {**client, "client_id": settings["clientMetadataUrl"]}, fields
        if "registration_endpoint" in issuer:
            yield client, fields         # it gets an id there

    def _ask(self, issuer, client, asked, cancel):
        """-> fields for the token endpoint: the code of a page on which the person agreed."""
        import hashlib                                    # slow to import, so only where needed
        if "S256" not in issuer.get("code_challenge_methods_supported", []):
            raise PaiError(f"{issuer['issuer']} has no PKCE, so no login there is safe")
        if not self.authorize:
            raise PaiError("it needs a login: /mcp login")
        state, verifier = os.urandom(16).hex(), os.urandom(32).hex()
        digest = hashlib.sha256(verifier.encode()).digest()
        back = {"redirect_uri": client["redirect_uris"][0]}
        page = _endpoint(issuer, "authorization_endpoint")
        answer = self.authorize(page + ("&" if "?" in page else "?") + urllib.parse.urlencode({
            **asked, **back, "response_type": "code", "client_id": client["client_id"],
            "state": state, "code_challenge_method": "S256",
            "code_challenge": base64.urlsafe_b64encode(digest).decode().rstrip("=")}), cancel)
        is_signed = issuer.get("authorization_response_iss_parameter_supported")
        if answer.get("iss", None if is_signed else issuer["issuer"]) != issuer["issuer"]:
            raise PaiError(f"{answer.get('iss', 'nobody')} answered for {issuer['issuer']}")
        if answer.get("state") != state or "code" not in answer:
            raise PaiError(f"{issuer['issuer']} gave no code: {answer.get('error', 'wrong state')}"
                           f" {answer.get('error_description', '')}")
        return {"grant_type": "authorization_code", "code": answer["code"], **back,
                "code_verifier": verifier}

    def _token(self, issuer, client, fields, cancel):
        """-> {access_token, ...} from the token endpoint.  Raises HttpError if it says no."""
        name, secret = client["client_id"], client.get("client_secret") or ""
        way, fields = client["token_endpoint_auth_method"], {**fields, "client_id": name}
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        if way == "client_secret_post":
            fields["client_secret"] = secret
        elif way == "client_secret_basic" and secret:
            login = f"{urllib.parse.quote(name, '')}:{urllib.parse.quote(secret, '')}"
            headers["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
        token = self._http.json("POST", _endpoint(issuer, "token_endpoint"),
                                urllib.parse.urlencode(fields).encode(), headers, cancel)
        if not re.fullmatch("[!-~]+", token.get("access_token") or ""):
            raise HttpError(400, str(token.get("error")), issuer["issuer"])      # GitHub's no
        return token


def login_in_browser(say: Callable, open_page: Callable, page: str, cancel: Cancel) -> dict:
    """Show the person a page; return the parameters of the URL on this machine it leads to."""
    place = ("127.0.0.1", int(re.search(r"redirect_uri=[^&]*%3A(\d+)", page)[1]))
    try:
        with socket.create_server(place) as callback, cancel.on_set(
                lambda: socket.create_connection(place).close()):        # it wakes accept()
            callback.settimeout(LOGIN_TIMEOUT_S)
            say(page)
            open_page(page)
            return _visit(callback, cancel)
    except OSError as e:                 # the port is taken, or nobody came
        raise PaiError(f"no login on port {place[1]} ({e}): try again, or set callbackPort") from e


def _visit(callback, cancel):
    """-> the parameters of the first visit that has any."""
    while True:
        connection, _ = callback.accept()
        with connection, contextlib.suppress(OSError):    # some browsers connect and say nothing
            cancel.check()
            connection.settimeout(3)
            request = re.match(rb"GET \S*\?(\S+)", connection.recv(65536))
            connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
                               b"PaiCLI got the answer; you can close this page.")
            if request:
                return dict(urllib.parse.parse_qsl(request[1].decode("latin-1")))
