"""Allow-lists, task files and settings of the `browser` gym: no browser."""

import asyncio

from cua_gyms import browser
from cua_gyms.browser import browser_tasks
from cua_gyms.browser import hosts
from cua_gyms.browser import socks
import pytest
from tunix.rl.multi_turn.environments import gyms

PAGES = {
  "buy": {"url": "http://shop.test/a/{seed}?x=1", "instruction": "Buy."},
  "find": {"url": "https://shop.test:8443/f?s={seed}", "max_turns": 3},
  "read": "http://shop.test/read",
}


class TestStartUrls:
  @pytest.mark.parametrize(
    "url, allowed",
    [
      ("http://shop.test/a", "http://shop.test/"),
      ("http://shop.test/a", "http://shop.test"),
      ("HTTP://SHOP.test:80/a/b?q=1", "http://shop.test/a"),
      ("http://[::1]:8000/", "http://[0:0::1]:8000/"),
      ("http://shop.test./", "http://shop.test/"),
    ],
  )
  def test_below(self, url, allowed):
    assert hosts.may_start(url, ["http://other.test/", allowed])

  @pytest.mark.parametrize(
    "url",
    [
      "https://shop.test/a/",
      "http://shop.test:81/a/",
      "http://shop.test/",
      "http://shop.test/ab",
      "http://evil.test/a/",
      "http://shop.test.evil.test/a/",
      "http://evil.test/http://shop.test/",
    ],
  )
  def test_not_below(self, url):
    assert not hosts.may_start(url, ["http://shop.test/a"])

  @pytest.mark.parametrize(
    "url, why",
    [
      ("file:///etc/passwd", "must begin with http"),
      ("javascript:alert(1)", "must begin with http"),
      ("data:text/html,x", "must begin with http"),
      ("http://shop.test\\@evil.test/", "backslashes"),
      ("http://shop.test/\n", "printable"),
      (" http://shop.test/", "printable"),
      ("http://shöp.test/", "printable"),
      ("http://shop.test@evil.test/", "no user name"),
      ("http:///a", "must have a host"),
      ("http://shop.test/a/../b", "'..' in its path"),
      ("http://shop.test/a/%2E%2e/b", "'..' in its path"),
      ("http://shop.test:99999/", "not an address"),
      (7, "printable"),
    ],
  )
  def test_what_is_read_in_two_ways_is_refused(self, url, why):
    with pytest.raises(hosts.UrlRefused, match=why) as caught:
      hosts.split(url)
    assert repr(url) in str(caught.value)


class TestHosts:
  @pytest.mark.parametrize(
    "pattern, host, port, allowed",
    [
      ("shop.test", "shop.test", 443, True),
      ("shop.test", "SHOP.test.", 80, True),
      ("shop.test", "shop.test", 8080, False),
      ("shop.test", "a.shop.test", 80, False),
      ("*.shop.test", "a.b.shop.test", 80, True),
      ("*.shop.test", "shop.test", 80, False),
      ("*.shop.test", "evilshop.test", 80, False),
      ("shop.test:8080", "shop.test", 8080, True),
      ("shop.test:8080", "shop.test", 80, False),
      ("::1", "::1", 80, True),
      ("[::1]:8000", "0:0::1", 8000, True),
    ],
  )
  def test_patterns(self, pattern, host, port, allowed):
    assert hosts.Hosts([pattern]).allow(host, port) is allowed

  @pytest.mark.parametrize(
    "pattern", ["", "*", "a.*.test", "http://x", "a/b", "u@h", "h:x", 7]
  )
  def test_wrong_patterns_are_named(self, pattern):
    with pytest.raises(ValueError, match="hosts: ") as caught:
      hosts.Hosts([pattern])
    assert repr(pattern) in str(caught.value)

  def test_the_start_pages_host_comes_with_it(self):
    none = hosts.Hosts()
    plain = none.including("http://shop.test/a")
    assert plain.allow("shop.test", 443) and plain.allow("shop.test", 80)
    odd = none.including("http://shop.test:8000/a")
    assert odd.allow("shop.test", 8000) and not odd.allow("shop.test", 80)
    assert not none.allow("shop.test", 80)
    assert odd.allow_url("http://shop.test:8000/x")
    for url in ("ftp://shop.test:8000/", "file:///x", "blob:x", "http://["):
      assert not odd.allow_url(url)


@pytest.mark.parametrize(
  "addresses, allowed",
  [
    (["10.0.0.5", "127.0.0.1", "::1"], ["10.0.0.5", "127.0.0.1", "::1"]),
    (["93.184.215.14", "127.0.0.1", "10.0.0.5"], ["93.184.215.14"]),
    (["169.254.169.254", "fe80::1%eth0", "0.0.0.0", "::"], []),
    (["::ffff:169.254.169.254", "::ffff:127.0.0.1"], ["127.0.0.1"]),
    (["224.0.0.1", "93.184.215.14", "93.184.215.14"], ["93.184.215.14"]),
  ],
)
def test_a_name_never_means_where_credentials_are(addresses, allowed):
  assert socks.may_mean(addresses) == allowed


@pytest.mark.asyncio
async def test_a_name_that_comes_to_mean_another_machine_leads_nowhere_new(
  monkeypatch,
):
  """DNS rebinding: the names are made up, the connections are real."""
  greeted = []

  async def greet(_, writer):
    greeted.append(writer.get_extra_info("sockname")[0])
    writer.close()

  first = await asyncio.start_server(greet, "127.0.0.1", 0)
  port = first.sockets[0].getsockname()[1]
  second = await asyncio.start_server(greet, "127.0.0.2", port)
  now = ["127.0.0.1"]
  monkeypatch.setattr(
    socks.socket,
    "getaddrinfo",
    lambda host, port, *_: [(2, 1, 6, "", (a, port)) for a in now],
  )
  proxy = socks.FilteringProxy(hosts.Hosts(["*.shop.test:%d" % port]))
  await proxy.open()

  async def ask(name):
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"\x05\x01\x00\x05\x01\x00\x03" + bytes([len(name)]))
    writer.write(name.encode() + port.to_bytes(2, "big"))
    reply = await reader.readexactly(12)
    writer.close()
    return reply[3]

  assert await ask("a.shop.test") == 0
  now[:] = ["127.0.0.2"]
  assert await ask("A.shop.test.") == 0
  assert await ask("b.shop.test") == 0
  now[:] = ["169.254.169.254"]
  assert await ask("c.shop.test") == 2
  assert proxy.blocked == {f"c.shop.test:{port}": 1}
  async with asyncio.timeout(10):
    while len(greeted) < 3:
      await asyncio.sleep(0.01)
  assert greeted == ["127.0.0.1", "127.0.0.1", "127.0.0.2"]
  proxy.close()
  first.close()
  second.close()


@pytest.mark.asyncio
async def test_the_proxy_speaks_socks_and_refuses_by_the_book():
  async def upstream(reader, writer):
    writer.write(await reader.readexactly(4))
    writer.close()

  server = await asyncio.start_server(upstream, "127.0.0.1", 0)
  port = server.sockets[0].getsockname()[1]
  proxy = socks.FilteringProxy(hosts.Hosts([f"127.0.0.1:{port}"]))
  await proxy.open()

  async def say(*parts: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    for part in parts:
      writer.write(part)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer

  hello, where = b"\x05\x01\x00", port.to_bytes(2, "big")
  named = b"\x05\x01\x00\x03\x09127.0.0.1" + where
  numbered = b"\x05\x01\x00\x01\x7f\x00\x00\x01" + where
  opened = b"\x05\x00" + b"\x05\x00\x00\x01" + bytes(6)
  assert await say(hello, named, b"ping") == opened + b"ping"
  assert await say(hello, numbered, b"pong") == opened + b"pong"
  other = b"\x05\x01\x00\x03\x09localhost" + where
  assert (await say(hello, other))[2:4] == b"\x05\x02"
  assert proxy.blocked == {f"localhost:{port}": 1}
  bind = b"\x05\x02\x00\x01\x7f\x00\x00\x01" + where
  assert (await say(hello, bind))[2:4] == b"\x05\x07"
  assert await say(b"\x05\x01\x02") == b"\x05\xff"  # Only with a password.
  for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\x05", b"\x04\x01"):
    assert await say(nonsense) == b""
  no_name = b"\x05\x01\x00\x03\x02\xff\xff\x00\x50"
  assert await say(hello, no_name) == b"\x05\x00"
  proxy.close()
  proxy.close()
  with pytest.raises(OSError):
    await asyncio.open_connection("127.0.0.1", proxy.port)
  server.close()


class TestTasks:
  def test_the_seed_makes_the_instance(self):
    tasks = browser.WebTasks(pages=PAGES)
    assert tasks.families() == ("buy", "find", "read")
    task = tasks.task("buy", 7)
    assert task.task_id == "browser/buy/7" and task.instruction == "Buy."
    assert task.params == {"url": "http://shop.test/a/7?x=1"}
    assert task.max_turns == browser_tasks.DEFAULT_MAX_TURNS
    assert tasks.task("find", 1).max_turns == 3
    for index in range(50):
      train, held_out = (
        draw("buy", index, 3) for draw in (tasks.train_task, tasks.eval_task)
      )
      assert train.seed < browser_tasks.EVAL_SEEDS_FROM <= held_out.seed

  def test_a_file_is_read_and_its_mistakes_are_named(self, tmp_path):
    file = tmp_path / "pages.yaml"
    file.write_text("buy: {url: 'http://shop.test/{seed}'}\n")
    tasks = gyms.get("browser").make_tasks(("buy",), {"pages": str(file)})
    assert tasks.task("buy", 1).params["url"] == "http://shop.test/1"
    for text, words in (
      ("buy: {url: 'file:///x'}", "'buy': url='file:///x' must begin"),
      ("buy: {link: x}", "'buy': needs a url"),
      ("buy: {url: 'http://a', turns: 3}", "takes no 'turns'"),
      ("buy: {url: 'http://a', max_turns: 0}", "max_turns=0 must be"),
      ("buy: {url: 'http://a', max_turns: true}", "max_turns=True must be"),
      ("- buy", "must hold names with a url"),
      ("buy: [", "not valid YAML"),
      ("", "must hold names with a url"),
    ):
      file.write_text(text)
      with pytest.raises(ValueError, match="pages") as caught:
        browser.WebTasks(pages=str(file))
      assert words in str(caught.value), text

  def test_what_is_not_there(self):
    with pytest.raises(ValueError, match="needs pages: a YAML file"):
      browser.WebTasks()
    with pytest.raises(ValueError, match="no-such.yaml cannot be read: No"):
      browser.WebTasks(pages="no-such.yaml")
    with pytest.raises(ValueError, match="did you mean 'buy'"):
      browser.WebTasks(("by",), pages=PAGES)
    with pytest.raises(ValueError, match=r"seed=-1 must be in"):
      browser.WebTasks(pages=PAGES).task("buy", -1)

  def test_start_urls_of_pages(self):
    assert browser_tasks.start_urls(PAGES) == (
      "http://shop.test/a/",
      "https://shop.test:8443/f",
      "http://shop.test/read",
    )
    with pytest.raises(ValueError, match="in its host"):
      browser_tasks.start_urls({"x": "http://s{seed}.test/"})


class TestSettings:
  @pytest.mark.parametrize(
    "settings, words",
    [
      ({"evaluator": "web_sites:none"}, "evaluator='web_sites:none'"),
      ({"evaluator": "web_sites"}, "package.module:attribute"),
      ({"evaluator": 3}, "evaluator=3 must be a function"),
      ({"evaluator": {"a": 3}}, "evaluator of 'a'=3"),
      ({"start_urls": []}, "start_urls is empty"),
      ({"start_urls": "http://a/"}, "must be lists"),
      ({"start_urls": ["file:///"]}, "start_urls: url='file:///'"),
      ({"hosts": ["*"]}, "hosts: '*' must be"),
      ({"scale": 0}, "scale=0 must be in"),
      ({"width": 10}, "width=10 must be in [64, 4096]"),
      ({"width": 401, "scale": 2}, "no multiples of scale=2"),
      ({"settle_s": "3"}, "settle_s='3' must be in"),
      ({"timeout_s": 0}, "timeout_s=0 must be in"),
    ],
  )
  def test_bad_values_are_refused(self, settings, words):
    good = {"evaluator": "web_sites:greeted", "start_urls": ["http://a/"]}
    with pytest.raises(ValueError) as caught:
      browser.WebGym(**{**good, **settings})
    assert words in str(caught.value)

  @pytest.mark.parametrize(
    "options, words",
    [
      ({}, "needs option 'evaluator'"),
      ({"evaluator": "a:b", "starturls": []}, "did you mean 'start_urls'"),
      ({"evaluator": 3}, "evaluator=3: gym 'browser' takes str"),
      ({"evaluator": "a:b", "settle_s": "3"}, "takes float"),
      ({"evaluator": "a:b", "hosts": "a"}, "takes Sequence[str]"),
    ],
  )
  def test_options_are_held_to_the_signature(self, options, words):
    with pytest.raises(ValueError) as caught:
      gyms.make("browser", **options)
    assert words in str(caught.value)

  def test_pages_may_be_the_allow_list(self):
    gym = browser.WebGym(evaluator="web_sites:greeted", pages=PAGES)
    assert gym._start_urls == browser_tasks.start_urls(PAGES)  # pylint: disable=protected-access
