"""Images of requests are fetched from listed public places only."""

import asyncio
import threading
import zlib

from agent_services.serving import media
from media_sites import at
from media_sites import authority_fixture  # noqa: F401
from media_sites import BAD
from media_sites import FETCH
from media_sites import HOST
from media_sites import LARGE
from media_sites import make_fixture  # noqa: F401
from media_sites import PNG
from media_sites import refused
from media_sites import site_fixture  # noqa: F401
from media_sites import tls_site_fixture  # noqa: F401
from media_sites import URL
import pytest

# ---- Which URLs ----


@pytest.mark.parametrize(
  "url",
  [
    "file:///etc/passwd",
    "ftp://good.test/i.png",
    "blob:https://good.test",
    "good.test/i.png",
    "//good.test",
    "",
    " https://good.test/",
  ],
)
async def test_other_schemes_are_refused_and_named(make, url):
  message = await refused(make("good.test"), url, URL, "or an https: URL")
  assert repr(url.partition(":")[0]) in message


async def test_a_url_is_a_string(make):
  await refused(make(), {"url": "data:"}, URL, "not dict")


async def test_http_is_refused_unless_it_is_allowed(make, site):
  url = site.url + "/i.png"
  await refused(make(site.name, allow_http=False), url, URL, "'http'")
  assert not site.connections
  await make(site.name).load(url)


async def test_fetching_is_off_without_a_list(make, site):
  await refused(make(), site.url + "/i.png", HOST, "fetching is off")
  assert not site.connections


@pytest.mark.parametrize(
  "url",
  [
    "http://sub.good.test:{port}/",
    "http://good.test.evil.test:{port}/",
    "http://good.test.:{port}/",
    "http://xgood.test:{port}/",
    "http://good.test/",
    "http://good.test:1/",
    "http://good.test:0/",
    "http://127.0.0.1:{port}/",
    "http://[::1]:{port}/",
    "http://good.test%2eevil.test:{port}/",
    "http:good.test:{port}",
    "http://evil.test:{port}/#good.test",
    "http:///good.test:{port}",
    "http://evil.test:{port}/?good.test",
  ],
)
async def test_only_exactly_the_listed_host_is_fetched(make, site, url):
  url = url.format(port=site.port)
  await refused(make(site.name), url, HOST, "not in allowed_hosts")
  assert not site.connections


@pytest.mark.parametrize(
  "user, host",
  [
    ("good.test", "evil.test"),
    ("good.test:{port}", "evil.test"),
    ("good.test\\", "evil.test"),
    ("me:secret", "good.test"),
    ("evil.test", "good.test"),
  ],
)
async def test_a_user_name_is_refused(make, site, user, host):
  url = f"http://{user}@{host}:{{port}}/".format(port=site.port)
  await refused(make(site.name), url, URL, "user name")
  assert not site.connections


@pytest.mark.parametrize(
  "url",
  [
    "http://good.test:x/",
    "http://\ud800/",
    "http://a\n/",
    "http://①.test/",
    "http://" + "a" * 70_000,
  ],
  ids=["port", "surrogate", "control", "idna", "long"],
)
async def test_what_is_no_url_is_refused(make, url):
  await refused(make("good.test"), url, URL, "not a URL")


async def test_names_are_compared_in_lower_case_and_idna(make, site):
  name = f"XN--bcher-kva.test:{site.port}"
  loader = make(name)
  await loader.load(f"http://B\u00dccher.test:{site.port}/i.png")
  await loader.load(f"HTTP://{name}/i.png")
  assert f"host: {name.lower()}\r\n" in site.requests[0].lower()


async def test_a_host_without_port_is_meant_at_its_own_port(make):
  resolve = at("10.0.0.1")
  loader = make("a.test", "b.test:443", _resolve=resolve)
  for url in (
    "https://a.test/",
    "https://a.test:443/",
    "http://a.test/",
    "https://b.test/",
  ):
    await refused(loader, url, HOST, "no public address")
  assert [port for _, port in resolve.asked] == [443, 443, 80, 443]
  for url in (
    "https://a.test:80/",
    "http://a.test:443/",
    "http://b.test/",
    "https://b.test:0/",
  ):
    await refused(loader, url, HOST, "allowed_hosts")


@pytest.mark.parametrize(
  "host",
  [
    "*",
    "*.good.test",
    "https://good.test",
    "good.test/",
    "good.test:0",
    "good.test:70000",
    "good.test:",
    "",
    ".good.test",
    "good.test.",
    "a b",
    "bücher.test",
    "me@good.test",
    "[::1]",
    "a" * 64 + ".test",
  ],
)
def test_a_limit_names_exact_hosts(host):
  with pytest.raises(ValueError, match="allowed_hosts"):
    media.MediaLimits(allowed_hosts=(host,))


def test_impossible_limits_cannot_be_built():
  for name, value in (
    ("allowed_hosts", "ab"),
    ("max_bytes", 0),
    ("max_pixels", 0),
    ("max_pixels", 10**9),
    ("timeout_s", 0),
    ("timeout_s", float("inf")),
    ("timeout_s", float("nan")),
    ("max_redirects", -1),
  ):
    with pytest.raises(ValueError, match=name):
      media.MediaLimits(**{name: value})


# ---- Addresses ----


@pytest.mark.parametrize(
  "address",
  [
    "127.0.0.1",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.0.1",
    "100.64.0.1",
    "169.254.169.254",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "192.88.99.1",
    "::",
    "::1",
    "fe80::1",
    "fe80::1%1",
    "fd00:ec2::254",
    "fec0::1",
    "ff0e::1",
    "2001:db8::1",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "::127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b:1::7f00:1",
    "2002:7f00:1::1",
    "2001:0:7f00:1::1",
  ],
)
async def test_only_public_addresses_are_connected_to(make, address):
  """By the rule that is used when none is injected."""
  resolve = at("8.8.8.8", "2606:4700::1111", address)  # One is enough.
  loader = make("good.test", strict=True, _resolve=resolve)
  message = await refused(loader, "https://good.test/", HOST)
  assert f"at {address}, no public address" in message
  assert len(resolve.asked) == 1


async def test_the_systems_resolver_is_checked_like_any(make, site):
  for name in ("localhost", "127.0.0.1", "0x7f.1", "2130706433"):
    loader = make(f"{name}:{site.port}", strict=True)
    url = f"http://{name}:{site.port}/i.png"
    await refused(loader, url, HOST, "127.0.0.1|::1")
  assert not site.connections


async def test_the_connection_goes_to_the_address_that_was_checked(make, site):
  addresses, checked = ["127.0.0.1", "127.0.0.2"], []

  async def rebinding(host, port):
    assert (host, port) == ("good.test", site.port)
    return [addresses.pop(0)]

  loader = make(
    site.name,
    _resolve=rebinding,
    _is_allowed_address=lambda a: checked.append(a) is None,
  )
  await loader.load(site.url + "/i.png")
  assert addresses == ["127.0.0.2"] and checked == ["127.0.0.1"]
  assert f"Host: {site.name}\r\n" in site.requests[0]


async def test_an_address_that_refuses_gives_way_to_the_next(make, site):
  resolve = at("127.0.0.2", "127.0.0.1")
  rule = lambda address: True
  loader = make(site.name, _resolve=resolve, _is_allowed_address=rule)
  await loader.load(site.url + "/i.png")


async def test_a_name_without_address_may_be_tried_again(make):
  async def unknown(host, port):
    raise OSError("Name or service not known")

  for resolve, match in ((unknown, "not known"), (at(), "no address")):
    loader = make("good.test", _resolve=resolve)
    await refused(loader, "https://good.test/", FETCH, match, retryable=True)


# ---- TLS ----


async def test_the_certificate_is_verified_for_the_name(
  make, tls_site, authority
):
  """Also after a connection to the same address, for another name."""
  other = f"other.test:{tls_site.port}"
  loader = make(tls_site.name, other, https=True, _ssl_context=authority[1])
  await loader.load(tls_site.url + "/i.png")
  await refused(loader, f"https://{other}/i.png", FETCH, "Hostname mismatch")
  assert len(tls_site.requests) == 1


async def test_an_unknown_certificate_is_refused(make, tls_site):
  loader = make(tls_site.name, https=True)
  await refused(loader, tls_site.url + "/i.png", FETCH, "self.signed")
  assert not tls_site.requests


# ---- Redirects ----


async def test_redirects_are_followed_without_cookies(make, site):
  location = f"Location: http://{site.name}/two?x=%2F"
  site.answer("/one", b"", "301 Moved", location, "Set-Cookie: a=b")
  site.redirect("/two?x=%2F", "/i.png")
  await make(site.name).load(site.url + "/one")
  paths = [r.split()[1] for r in site.requests]
  assert paths == ["/one", "/two?x=%2F", "/i.png"]
  for request in site.requests:
    assert "cookie" not in request.lower()
    assert "authorization" not in request.lower()


@pytest.mark.parametrize(
  "to, code",
  [
    ("http://evil.test:{port}/i.png", HOST),
    ("//evil.test:{port}/i.png", HOST),
    ("http://sub.good.test:{port}/i.png", HOST),
    ("http://good.test:1/i.png", HOST),
    ("http://127.0.0.1:{port}/i.png", HOST),
    ("http://inside.test:{port}/i.png", HOST),
    ("http://me@good.test:{port}/i.png", URL),
    ("file:///etc/passwd", URL),
    ("data:image/png;base64,AAAA", URL),
    ("http://good.test:x/", URL),
  ],
)
async def test_each_hop_is_checked_like_the_first(make, site, to, code):
  async def resolve(host, port):
    return ["10.0.0.1" if host == "inside.test" else "127.0.0.1"]

  site.redirect("/one", to.format(port=site.port))
  loader = make(site.name, f"inside.test:{site.port}", _resolve=resolve)
  await refused(loader, site.url + "/one", code)
  assert len(site.requests) == 1


async def test_https_does_not_lead_to_http(make, tls_site, site, authority):
  tls_site.redirect("/one", site.url + "/i.png")
  names = tls_site.name, site.name
  loader = make(*names, https=True, _ssl_context=authority[1])
  await refused(loader, tls_site.url + "/one", URL, "'http'")
  assert not site.connections


@pytest.mark.parametrize("allowed", [0, 3])
async def test_a_redirect_loop_ends(make, site, allowed):
  site.redirect("/one", "/one")
  loader = make(site.name, max_redirects=allowed)
  await refused(loader, site.url + "/one", FETCH, "max_redirects")
  assert len(site.requests) == allowed + 1


# ---- Bodies ----


async def test_the_content_type_is_not_believed(make, site):
  site.answer("/t", PNG, "200 OK", "Content-Type: text/html")
  site.answer("/p", b"<html>", "200 OK", "Content-Type: image/png")
  await make(site.name).load(site.url + "/t")
  await refused(make(site.name), site.url + "/p", BAD)


async def test_a_fetched_image_has_the_same_limit_of_pixels(make, site):
  await refused(make(site.name, max_pixels=53), site.url + "/i.png", LARGE)


async def test_a_declared_length_is_refused_before_the_body(make, site):
  async def declare(reader, writer):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100001\r\n\r\n")
    await reader.readuntil()  # Until it hangs up.

  site.routes["/big"] = declare
  loader = make(site.name, max_bytes=100_000)
  await refused(loader, site.url + "/big", LARGE, "100001")
  await asyncio.wait_for(site.hung_up.wait(), 20)


async def test_a_body_is_cut_where_it_is_too_long(make, site):
  async def pour(reader, writer):
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(1024):
      writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
      await writer.drain()
      site.sent += 65536

  site.routes["/big"] = pour
  loader = make(site.name, max_bytes=100_000)
  await refused(loader, site.url + "/big", LARGE, "max_bytes")
  await asyncio.wait_for(site.hung_up.wait(), 20)
  assert site.sent < 32 << 20  # Of 64; what the sockets buffer is no more.


async def test_a_compressed_body_is_not_inflated(make, site):
  packed = zlib.compress(PNG)
  site.answer("/z", packed, "200 OK", "Content-Encoding: deflate")
  await refused(make(site.name), site.url + "/z", BAD)
  assert "Accept-Encoding: identity\r\n" in site.requests[0]


@pytest.mark.parametrize(
  "status, later",
  [
    ("404 Not Found", False),
    ("304 Not Modified", False),
    ("206 Partial", False),
    ("429 Too Many", True),
    ("503 Down", True),
  ],
)
async def test_a_status_tells_whether_to_try_again(make, site, status, later):
  site.answer("/s", b"", status)
  loader = make(site.name)
  await refused(loader, site.url + "/s", FETCH, status[:3], retryable=later)


async def test_a_broken_answer_may_be_tried_again(make, site):
  async def short(reader, writer):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nabc")
    raise OSError

  site.routes["/short"] = short
  await refused(make(site.name), site.url + "/short", FETCH, retryable=True)


async def test_the_environment_names_no_proxy(make, site, monkeypatch):
  for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv(name.lower(), "http://127.0.0.1:1")
  await make(site.name).load(site.url + "/i.png")


# ---- The deadline ----


async def test_a_body_that_drips_is_given_up(make, site):
  async def drip(reader, writer):
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(PNG)}\r\n\r\n"
    writer.write(head.encode())
    for byte in PNG:  # Each in time, all of them not.
      writer.write(bytes([byte]))
      await writer.drain()
      await asyncio.sleep(0.01)

  site.routes["/drip"] = drip
  loader = make(site.name, timeout_s=0.3)
  await refused(loader, site.url + "/drip", FETCH, "timeout_s", retryable=True)
  await asyncio.wait_for(site.hung_up.wait(), 20)


async def test_redirects_share_one_deadline(make, site):
  def slow(to):
    async def answer(reader, writer):
      await asyncio.sleep(0.15)
      head = f"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: {to}"
      writer.write(head.encode() + b"\r\n\r\n")

    return answer

  for i in range(3):
    site.routes[f"/{i}"] = slow(f"/{i + 1}")
  site.answer("/3", PNG)
  url = site.url + "/0"
  await make(site.name).load(url)
  loader = make(site.name, timeout_s=0.4)
  await refused(loader, url, FETCH, "timeout_s", retryable=True)


async def test_a_resolver_that_hangs_is_given_up(make, monkeypatch):
  go_on = threading.Event()
  hang = lambda *args, **kwargs: go_on.wait(30)
  monkeypatch.setattr(media.socket, "getaddrinfo", hang)
  loader = make("good.test", strict=True, timeout_s=0.1)
  try:
    url = "https://good.test/"
    await refused(loader, url, FETCH, "timeout_s", retryable=True)
  finally:
    go_on.set()
