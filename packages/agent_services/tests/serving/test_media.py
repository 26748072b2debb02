"""Images that requests bring with them: checked before they cost anything."""

import asyncio
import base64
import io
import threading

from agent_services.serving import media
from agent_services.serving import pictures
from media_sites import BAD
from media_sites import data_url
from media_sites import encoded
from media_sites import FETCH
from media_sites import HOST
from media_sites import LARGE
from media_sites import make_fixture  # noqa: F401
from media_sites import PIXELS
from media_sites import PNG
from media_sites import png_header
from media_sites import refused
from media_sites import SlowStore
from media_sites import until
from media_sites import URL
import numpy as np
from PIL import Image
from PIL import ImageFile
import pytest
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import trajectory


async def test_a_data_url_becomes_a_reference_to_its_pixels(make):
  store = images.ImageStore()
  ref = await make(store=store).load(data_url(PNG))
  assert isinstance(ref, trajectory.ImageRef)
  assert (ref.width, ref.height) == (9, 6)
  np.testing.assert_array_equal(store.get(ref), PIXELS)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif"])
async def test_each_format_is_read_whatever_the_url_calls_it(make, kind):
  store = images.ImageStore()
  data = encoded(PIXELS, kind.upper())
  ref = await make(store=store).load(data_url(data))
  with Image.open(io.BytesIO(data)) as image:
    np.testing.assert_array_equal(store.get(ref), image.convert("RGB"))


def _two_colours(mode):
  image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
  image.putpixel((1, 0), (0, 0, 0, 0))
  return image.convert(mode)


def _palette():
  image = Image.frombytes("P", (2, 1), b"\0\1")
  image.putpalette([1, 2, 3, 4, 5, 6])
  return image


@pytest.mark.parametrize(
  "data, row",
  [
    (encoded(_two_colours("RGBA")), [[255, 0, 0], [255, 255, 255]]),
    (encoded(_two_colours("LA")), [[76] * 3, [255] * 3]),
    (encoded(_palette(), transparency=b"\xff\0"), [[1, 2, 3], [255] * 3]),
    (
      encoded(_two_colours("RGB"), transparency=(0, 0, 0)),
      [[255, 0, 0], [255, 255, 255]],
    ),
    (
      encoded(np.array([[0x1234, 0xFEDC]], np.uint16)),
      [[0x12] * 3, [0xFE] * 3],
    ),
    (encoded(Image.new("1", (2, 1), 1)), [[255] * 3] * 2),
    (encoded(Image.new("CMYK", (2, 1)), "JPEG"), [[255] * 3] * 2),
  ],
  ids=["rgba", "la", "palette", "trns", "16-bit", "1-bit", "cmyk"],
)
async def test_transparency_shows_white_and_every_mode_becomes_rgb(
  make, data, row
):
  store = images.ImageStore()
  ref = await make(store=store).load(data_url(data))
  assert store.get(ref).tolist() == [row]


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
async def test_animations_are_refused(make, kind):
  frame = Image.fromarray(255 - PIXELS)
  data = encoded(PIXELS, kind, save_all=True, append_images=[frame])
  await refused(make(), data_url(data), BAD, "one frame as PNG")


@pytest.mark.parametrize(
  "change",
  [
    lambda b: b + "\n",
    lambda b: b[:8] + "\n" + b[8:],
    lambda b: b[:8] + "    " + b[8:],
    lambda b: b[:8] + "-_-_" + b[8:],
    lambda b: b[:8] + "====" + b[8:],
    lambda b: "QUI=" + b,
    lambda b: b.rstrip("=")[:-1],
    lambda b: b + "====",
    lambda b: b[:8] + "\ud800é😀ü" + b[8:],
  ],
)
async def test_base64_is_strict(make, monkeypatch, change):
  monkeypatch.setattr(media, "_CHUNK", 4)  # Padding at the end of a chunk.
  url = "data:image/png;base64," + change(base64.b64encode(PNG).decode())
  await refused(make(), url, URL, "strict base64")


async def test_a_long_image_is_put_together_from_its_chunks(make, monkeypatch):
  monkeypatch.setattr(media, "_CHUNK", 8)
  store = images.ImageStore()
  ref = await make(store=store).load(data_url(PNG))
  np.testing.assert_array_equal(store.get(ref), PIXELS)


@pytest.mark.parametrize(
  "url",
  [
    "data:text/html;base64,AAAA",
    "data:image/svg+xml;base64,AAAA",
    "data:image/png,AAAA",
    "data:image/png;charset=x;base64,AAAA",
    "data:",
  ],
)
async def test_other_data_urls_are_refused(make, url):
  await refused(make(), url, URL, "data:image/png;base64,")


@pytest.mark.parametrize(
  "data",
  [
    b"",
    b"GIF89a",
    PNG[:60],
    PNG[:20] + b"\xff" + PNG[21:],
    b"<svg/>",
    encoded(PIXELS, "BMP"),
  ],
)
async def test_what_is_no_image_is_refused(make, data):
  await refused(make(), data_url(data), BAD, "PNG")


async def test_bytes_are_counted_before_base64_is_decoded(make):
  exact = make(max_bytes=len(PNG))
  await exact.load(data_url(PNG))
  await exact.aclose()  # Without threads, nothing is decoded or hashed.
  for more in range(1, 4):
    await refused(exact, data_url(PNG + b"\0" * more), LARGE, "max_bytes")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
  "data",
  [encoded(Image.new("1", (4097, 4096)))]
  + [png_header(side, side) for side in (12_000, 30_000, 2**31 - 1)],
  ids=["whole", "warned", "refused by Pillow", "largest"],
)
async def test_pixels_are_counted_before_they_are_decoded(
  make, monkeypatch, data
):
  monkeypatch.setattr(ImageFile.ImageFile, "load", _must_not_be_called)
  await refused(make(), data_url(data), LARGE, "max_pixels")


def _must_not_be_called(*args):
  raise AssertionError("pixels were decoded")


@pytest.mark.filterwarnings("error::PIL.Image.DecompressionBombWarning")
async def test_a_bomb_warning_made_an_error_says_the_same(make):
  url = data_url(png_header(12_000, 12_000))
  await refused(make(), url, LARGE, "max_pixels")


async def test_max_pixels_is_width_times_height(make):
  loader = make(max_pixels=6 * 9)
  await loader.load(data_url(PNG))
  wide = encoded(np.zeros((5, 11, 3), np.uint8))
  await refused(loader, data_url(wide), LARGE, "max_pixels is 54")


async def test_one_url_is_decoded_once_while_the_store_has_its_image(make):
  store = SlowStore(capacity_bytes=PIXELS.nbytes)
  store.go_on.set()
  loader = make(store=store)
  first = await loader.load(data_url(PNG))
  assert await loader.load(data_url(PNG)) == first and store.puts == 1
  await loader.load(data_url(encoded(255 - PIXELS)))
  assert first not in store
  assert await loader.load(data_url(PNG)) == first and store.puts == 3
  assert first in store


async def test_concurrent_loads_decode_once_and_survive_a_cancelled_one(make):
  store = SlowStore()
  loader = make(store=store)
  loads = [asyncio.create_task(loader.load(data_url(PNG))) for _ in range(8)]
  await until(store.entered.is_set)
  await asyncio.sleep(0.05)  # All of them wait.
  for doomed in loads[:2]:
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
      await doomed
  store.go_on.set()
  assert len(set(await asyncio.gather(*loads[2:]))) == 1 and store.puts == 1


async def test_a_failure_is_shared_and_tried_again(make):
  loader, url = make(), data_url(PNG[:60])
  for _ in range(2):
    await asyncio.gather(*(refused(loader, url, BAD) for _ in range(4)))
  assert not loader._decoding


async def test_only_so_many_urls_are_remembered(make, monkeypatch):
  monkeypatch.setattr(media, "_REMEMBERED", 2)
  loader = make()
  for value in range(5):
    await loader.load(data_url(encoded(np.full((1, 1, 3), value, np.uint8))))
  assert len(loader._known) == 2


async def test_the_event_loop_runs_while_an_image_is_read(make, monkeypatch):
  here, threads = threading.current_thread(), {}

  def spy(owner, name):
    real = getattr(owner, name)

    def call(*args, **kwargs):
      threads[name] = threading.current_thread()
      return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)

  spy(media, "_digest")
  spy(media.pybase64, "b64decode")
  spy(pictures.Image, "open")
  spy(pictures, "_to_rgb")
  store = SlowStore()
  large = np.zeros((2048, 2048, 3), np.uint8)
  url = data_url(encoded(large, compress_level=1))
  load = asyncio.create_task(make(store=store).load(url))
  await until(store.entered.is_set)  # The loop runs, and lets it go on.
  store.go_on.set()
  assert (await load).width == 2048
  assert len(threads) == 4 and here not in threads.values()


async def test_a_closed_loader_fails_what_waits_and_what_comes(make):
  store = SlowStore()
  loader = make(store=store)
  urls = [data_url(encoded(np.full((1, 1, 3), i, np.uint8))) for i in range(4)]
  loads = [asyncio.create_task(loader.load(url)) for url in urls]
  await until(lambda: store.puts == 2)  # Both threads are taken.
  await loader.aclose()
  store.go_on.set()
  results = await asyncio.gather(*loads, return_exceptions=True)
  kinds = sorted(type(result).__name__ for result in results)
  assert kinds == ["ImageRef"] * 2 + ["MediaError"] * 2
  await refused(loader, data_url(PNG), FETCH, "closed", retryable=True)
  await loader.aclose()


async def test_an_error_shows_the_head_of_a_url_only(make):
  loader = make("good.test")
  payload = "QUJD" * 100_000
  for url, code in (
    (f"data:image/png;base64,{payload}", BAD),
    (f"data:image/png;base64,{payload}!", URL),
    (f"data:image/what;base64,{payload}", URL),
    (f"https://evil.test/{payload[:40_000]}", HOST),
    (payload, URL),
  ):
    message = await refused(loader, url, code)
    assert url[:20] in message
    assert url[:61] not in message and len(message) < 300
  message = await refused(loader, "https://evil.test/a?Signature=s3cret", HOST)
  assert "evil.test/a" in message and "s3cret" not in message
  message = await refused(loader, "https://me:s3cret@good.test/a", URL)
  assert "good.test/a" in message and "s3cret" not in message
