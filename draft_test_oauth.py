"""TestOauth of section 20, stand-alone: python -m unittest test_oauth"""
import base64
import hashlib
import http.server
import json
import os
import pathlib
import socket
import stat
import threading
import unittest
import urllib.parse

import paicli
from test_paicli import POSIX, Case

SECTION = pathlib.Path(__file__).resolve().parent / "oauth.py"
if not hasattr(paicli, "OAuth"):         # as if it were pasted into paicli.py
    exec(compile("from __future__ import annotations\n# ===" + SECTION.read_text("utf-8").split("\n\n\n# ===", 1)[1],
                 str(SECTION), "exec"), vars(paicli))


# ---- to be pasted into test_paicli.py from here on ----------------------------------------------------

class AuthServer:
    """An authorization server and, below /mcp, what it protects; `pages` has path -> JSON, or a function
    (parameters, headers) -> (status, JSON), and `documents` is what the two well-known pages say."""

    def __init__(self):
        fake, self.requests, self.refresh_token = self, [], "r1"

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                is_json = self.headers.get("Content-Type") == "application/json"
                sent = (json.loads(body) if is_json else dict(urllib.parse.parse_qsl(body))) if body else {}
                fake.requests.append((self.path, sent, self.headers))
                page = fake.pages.get(self.path, lambda sent, headers: (404, {}))
                status, answer = page(sent, self.headers) if callable(page) else (200, page)
                answer = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST

            def log_message(self, *args):
                pass
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.issuer = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.url = self.issuer + "/mcp"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.resource = {"resource": self.url, "authorization_servers": [self.issuer]}
        self.metadata = {"issuer": self.issuer, "code_challenge_methods_supported": ["S256"],
                         **{f"{name}_endpoint": f"{self.issuer}/{name}" for name in ("authorization", "token", "registration")}}
        self.pages = {"/.well-known/oauth-protected-resource/mcp": self.resource,
                      "/.well-known/oauth-authorization-server": self.metadata, "/token": self.token,
                      "/registration": lambda wish, headers: (201, {"client_id": f"c{len(self.sent('/registration'))}"})}

    def token(self, form, headers):
        return 200, {"access_token": f"t{len(self.sent('/token'))}", "refresh_token": self.refresh_token}

    def sent(self, path):
        return [sent for p, sent, _ in self.requests if p == path]

    def paths(self):
        return [path for path, _, _ in self.requests]

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.server.shutdown()
        self.server.server_close()


def refuse(status, error):
    return lambda sent, headers: (status, {"error": error})


class TestOauth(Case):
    """Section 20.  Three stars of three."""

    def setUp(self):
        super().setUp()
        self.fake, self.asked, self.answer = self.stack.enter_context(AuthServer()), [], {}
        self.settings = {}
        self.auth = self.oauth()

    def person(self, page, cancel):
        """Agrees to all; `answer` changes what comes back (None: a parameter that is missing)."""
        self.asked.append(dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(page).query)))
        answer = {"code": "abc", "state": self.asked[-1]["state"], **self.answer}
        return {name: value for name, value in answer.items() if value is not None}

    def oauth(self, **options):
        options = {"settings": {self.fake.url: self.settings}, "authorize": self.person, **options}
        return paicli.OAuth(self.http(), self.path("mcp-auth.json"), **options)

    def refused(self, status=401, challenge="Bearer", auth=None):
        return (auth or self.auth).on_refusal(self.fake.url, status, challenge, paicli.Cancel())

    def no_login(self, pattern):
        """A 401 must end in an error, and no token may have been asked for."""
        n = len(self.fake.sent("/token"))
        self.raises(paicli.PaiError, pattern, self.refused)
        self.assertEqual(n, len(self.fake.sent("/token")))

    def test_a_challenge_is_read_and_a_place_is_known(self):
        self.assertEqual({"scope": "a b", "error": "x"}, paicli.parse_challenge('Basic realm="y", Bearer scope="a b", error=x'))
        self.assertEqual([{}, {}], [paicli.parse_challenge(text) for text in ("", "Negotiate")])
        self.assertEqual(["https://a.b/.well-known/x/c/d", "https://a.b:1/.well-known/y"],
                         [paicli.well_known("https://a.b/c/d", "x"), paicli.well_known("https://a.b:1/", "y")])

    def test_a_login_goes_from_document_to_document_to_a_token(self):
        self.assertIsNone(self.auth.header(self.fake.url))
        self.assertTrue(self.refused())
        self.assertEqual("Bearer t1", self.auth.header(self.fake.url))
        self.assertEqual(["/.well-known/oauth-protected-resource/mcp", "/.well-known/oauth-authorization-server",
                          "/registration", "/token"], self.fake.paths())
        wish, form = self.fake.sent("/registration")[0], self.fake.sent("/token")[0]
        self.assertEqual(("native", True), (wish["application_type"], "refresh_token" in wish["grant_types"]))
        asked = self.asked[0]
        digest = hashlib.sha256(form["code_verifier"].encode()).digest()
        self.assertEqual(("S256", base64.urlsafe_b64encode(digest).rstrip(b"=").decode()),
                         (asked["code_challenge_method"], asked["code_challenge"]))
        self.assertEqual(("c1", "abc", self.fake.url), (form["client_id"], form["code"], form["resource"]))
        self.assertEqual([wish["redirect_uris"][0]] * 2, [asked["redirect_uri"], form["redirect_uri"]])
        self.assertNotIn("scope", asked)
        self.assertEqual((self.fake.url, "code"), (asked["resource"], asked["response_type"]))
        self.assertFalse(self.refused(403))              # forbidden is no question of logging in

    def test_documents_are_looked_for_where_the_standards_say(self):
        fake, prm = self.fake, "/.well-known/oauth-protected-resource"
        fake.pages = {**fake.pages, prm + "/mcp": refuse(404, ""), prm: {**fake.resource, "resource": fake.issuer, "authorization_servers": [fake.issuer + "/t"]},
                      "/t/.well-known/openid-configuration": {**fake.metadata, "issuer": fake.issuer + "/t"}}
        self.assertTrue(self.refused())
        self.assertEqual([prm + "/mcp", prm, "/.well-known/oauth-authorization-server/t", "/.well-known/openid-configuration/t",
                          "/t/.well-known/openid-configuration", "/registration", "/token"], fake.paths())
        self.assertEqual(fake.issuer, fake.sent("/token")[0]["resource"])
        fake.requests.clear()
        fake.pages["/here"] = fake.resource
        self.assertTrue(self.refused(challenge=f'Bearer resource_metadata="{fake.issuer}/here"'))
        self.assertEqual(["/here", "/.well-known/oauth-authorization-server"], fake.paths()[:2])
        fake.pages.pop("/here"), fake.pages.pop(prm)      # as in 2025-03-26: the origin is the issuer
        self.assertTrue(self.refused())

    def test_documents_that_lie_or_make_no_sense_end_the_login(self):
        fake = self.fake
        for document, change, why in (
                (fake.resource, {"resource": "https://evil.example/mcp"}, "not itself"), (fake.resource, {"resource": fake.url + "x"}, "not itself"),
                (fake.resource, {"authorization_servers": [7]}, "makes no sense"), (fake.metadata, {"issuer": "https://evil.example"}, "says it is https://evil"),
                (fake.metadata, {"code_challenge_methods_supported": []}, "PKCE"), (fake.metadata, {"registration_endpoint": "http://evil.example/"}, "no safe reg"),
                (fake.metadata, {"authorization_endpoint": "file:///bin/sh"}, "no safe auth"), (fake.metadata, {"token_endpoint": "http://localhost:1@evil.example/"}, "no safe token")):
            before = dict(document)
            document.update(change)
            self.no_login(why)
            document.clear(), document.update(before)
        fake.metadata["scopes_supported"] = None          # as some write "nothing"
        fake.pages["/registration"] = refuse(403, "closed")
        self.no_login("takes no client of ours .*closed.*set oauth.clientId")
        fake.pages["/registration"] = {"client_id": "c"}
        self.auth = self.oauth(authorize=None)
        self.no_login("/mcp login")
        fake.pages = {"/token": fake.token}
        self.no_login("needs a login, but .* says it is None.*headers")

    def test_an_answer_must_come_from_the_issuer_that_was_asked(self):
        issuer, signed = self.fake.issuer, {"authorization_response_iss_parameter_supported": True}
        for metadata, answer, why in (
                (signed, {}, "nobody answered"), (signed, {"iss": issuer + "/"}, "/ answered"), ({}, {"iss": "https://evil.example"}, "evil.example answered"),
                ({}, {"iss": "x", "code": None, "error": "denied"}, "x answered"), ({}, {"state": "other"}, "wrong state"), ({}, {"state": None}, "wrong state"),
                ({}, {"code": None, "error": "access_denied"}, "access_denied")):
            self.fake.pages["/.well-known/oauth-authorization-server"], self.answer = {**self.fake.metadata, **metadata}, answer
            self.no_login(why)
        self.fake.metadata.update(signed)
        self.answer = {"iss": issuer}
        self.assertTrue(self.refused())

    def test_scopes_come_from_the_challenge_or_the_resource_and_grow(self):
        self.fake.resource["scopes_supported"] = ["p", "q", "offline_access"]
        self.assertTrue(self.refused(challenge='Bearer scope="a"'))
        step = 'Bearer error="insufficient_scope", scope="b"'
        self.assertEqual([True, False, False], [self.refused(403, text) for text in (step, step, 'Bearer error="insufficient_scope"')])
        self.assertEqual((["a", "a b"], 1), ([asked["scope"] for asked in self.asked], len(self.fake.sent("/registration"))))
        choose = paicli.choose_scope
        self.assertEqual(["p q", ""], [choose("", {}, self.fake.resource, {}), choose("", {}, {}, {"scopes_supported": ["offline_access"]})])
        self.assertEqual("a offline_access", choose("", {"scope": "a"}, self.fake.resource, {"scopes_supported": ["offline_access", "z"]}))

    def test_a_client_shows_itself_as_the_issuer_wants(self):
        made = {"client_id": "i:d", "client_secret": "s/t"}
        basic = "Basic " + base64.b64encode(b"i%3Ad:s%2Ft").decode()
        for way, secret, header in (("client_secret_basic", None, basic), ("client_secret_post", "s/t", None), ("none", None, None)):
            self.auth.logout(self.fake.url)
            self.fake.metadata["token_endpoint_auth_methods_supported"] = [way]
            self.fake.pages["/registration"] = lambda wish, headers: (201, made)
            self.assertTrue(self.refused())
            _, form, headers = self.fake.requests[-1]
            self.assertEqual((way, secret, header), (self.fake.sent("/registration")[-1]["token_endpoint_auth_method"],
                                                     form.get("client_secret"), headers["Authorization"]))

    def test_a_configured_client_comes_first_then_a_document_then_registering(self):
        self.fake.metadata["client_id_metadata_document_supported"] = True
        self.settings.update(clientMetadataUrl="https://me.example/c.json", callbackPort=8123)
        self.assertTrue(self.refused())
        self.assertEqual("http://127.0.0.1:8123/callback", self.asked[0]["redirect_uri"])
        self.auth.logout(self.fake.url)
        self.fake.pages["/token"] = lambda form, headers: refuse(400, "invalid_client")(0, 0) if ":" in form["client_id"] else self.fake.token(0, 0)
        self.assertTrue(self.refused())
        self.auth.logout(self.fake.url)
        self.settings.update(clientId="mine")
        self.assertTrue(self.refused())
        self.assertEqual(["https://me.example/c.json"] * 2 + ["c1", "mine"], [asked["client_id"] for asked in self.asked])
        self.assertEqual((1, "mine"), (len(self.fake.sent("/registration")), self.fake.sent("/token")[-1]["client_id"]))

    def test_a_program_without_a_person_uses_client_credentials(self):
        self.settings.update(clientId="me", clientSecret="s", grantType="client_credentials")
        self.auth = self.oauth(authorize=None)
        self.assertTrue(self.refused(challenge="Bearer scope=a"))
        self.assertEqual([{"grant_type": "client_credentials", "scope": "a", "resource": self.fake.url, "client_id": "me"}], self.fake.sent("/token"))

    def test_a_refused_token_is_refreshed_without_a_person(self):
        self.refused(challenge="Bearer scope=a")
        self.fake.refresh_token = None                    # the old one stays
        self.assertEqual([True] * 2, [self.refused(), self.refused()])
        self.assertEqual([{"grant_type": "refresh_token", "refresh_token": "r1", "client_id": "c1", "resource": self.fake.url, "scope": "a"}] * 2, self.fake.sent("/token")[1:])
        self.fake.pages["/token"] = refuse(503, "later")
        self.raises(paicli.HttpError, "503", self.refused)
        self.assertEqual(1, len(self.asked))
        self.fake.pages["/token"] = lambda form, headers: refuse(400, "invalid_grant")(0, 0) if "refresh_token" in form else self.fake.token(0, 0)
        self.assertTrue(self.refused())
        self.assertEqual(2, len(self.asked))
        self.fake.pages["/token"] = lambda form, headers: (200, {"error": "bad_code"})
        self.raises(paicli.PaiError, "bad_code", self.refused)

    def test_those_refused_at_the_same_time_share_one_login(self):
        other, looked = self.oauth(), threading.Semaphore(0)
        header = self.auth.header
        self.auth.header = lambda url: (header(url), looked.release())[0]

        def person(page, cancel):
            jobs.append(paicli.Job("second", self.refused))
            for _ in range(3):                            # twice the first, once the second
                self.assertTrue(looked.acquire(timeout=30))
            return self.person(page, cancel)
        jobs, self.auth.authorize = [], person
        self.assertEqual([True, True], [self.refused(), jobs[0].wait(timeout_s=30)])
        self.assertTrue(self.refused(auth=other))         # another process finds it in the file
        self.assertEqual((1, "Bearer t1"), (len(self.asked), other.header(self.fake.url)))
        cancel = paicli.Cancel()
        cancel.set("stop")
        self.assertRaises(paicli.Cancelled, self.auth.on_refusal, self.fake.url, 401, "", cancel)

    def test_another_issuer_sees_nothing_of_the_first(self):
        self.refused(challenge="Bearer scope=a")
        second = self.stack.enter_context(AuthServer())
        self.fake.resource["authorization_servers"] = [second.issuer]
        second.pages["/registration"] = lambda wish, headers: (201, {"client_id": "new"})
        self.assertTrue(self.refused())
        self.assertEqual((["new"], "new"), ([form["client_id"] for form in second.sent("/token")], self.asked[1]["client_id"]))
        self.assertNotRegex(repr(second.requests), "'c1'|'r1'")
        self.assertNotIn("scope", self.asked[1])
        self.settings.update(clientId="me", clientSecret="secret")
        self.fake.resource["authorization_servers"] = [self.fake.issuer]
        self.no_login("moved its login to")

    def test_tokens_are_kept_in_a_private_file_until_logout(self):
        self.refused()
        path = self.path("mcp-auth.json")
        self.assertEqual("Bearer t1", self.oauth().header(self.fake.url))
        self.assertEqual(0o600 if POSIX else 0, stat.S_IMODE(os.stat(path).st_mode) if POSIX else 0)
        self.auth.logout(self.fake.url)
        self.assertEqual([None, None], [self.auth.header(self.fake.url), self.oauth().header(self.fake.url)])
        self.write("mcp-auth.json", "[1")
        self.auth = self.oauth()
        os.remove(path), os.mkdir(path)                   # it can't be written: then for this run only
        self.assertEqual((True, "Bearer t2"), (self.refused(), self.auth.header(self.fake.url)))

    def test_a_browser_comes_back_with_the_answer(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
            page = "https://issuer.example/?" + urllib.parse.urlencode({"redirect_uri": f"http://127.0.0.1:{port}/callback"})
            self.raises(paicli.PaiError, f"no login on port {port}", paicli.login_in_browser, repr, repr, page, paicli.Cancel())
        shown, cancel = [], paicli.Cancel()

        def browser(page):
            """Connects for nothing, then for an icon, then with the answer."""
            for request in (b"", b"GET /favicon.ico HTTP/1.1\r\n\r\n", b"GET /callback?code=a%20b&state=s HTTP/1.1\r\n\r\n"):
                sock = self.stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                sock.sendall(request)
                sock.shutdown(socket.SHUT_WR)
        self.assertEqual({"code": "a b", "state": "s"}, paicli.login_in_browser(shown.append, browser, page, cancel))
        self.assertEqual([page], shown)
        self.assertRaises(paicli.Cancelled, paicli.login_in_browser, shown.append, lambda page: cancel.set("stop"), page, cancel)


if __name__ == "__main__":
    unittest.main()
