"""The room of a desktop: what its programs can reach, and what they leave."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest
from tunix.rl.multi_turn import config as config_lib

xdesktop = pytest.importorskip("cua_gyms.xdesktop")
from cua_gyms.sandbox import files  # noqa: E402
from cua_gyms.sandbox import processes  # noqa: E402
from cua_gyms.sandbox import rooms  # noqa: E402
from cua_gyms.sandbox import sandbox_errors  # noqa: E402
from cua_gyms.xdesktop import desktop as desktops  # noqa: E402
from cua_gyms.xdesktop import keyboard  # noqa: E402
from cua_gyms.xdesktop import programs  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[3]
KINDS = ("namespaces", "processes")
real = [
  pytest.mark.xdesktop,
  pytest.mark.skipif(
    bool(xdesktop.missing()),
    reason=f"no {', '.join(xdesktop.missing())} (sudo make desktop)",
  ),
]


def marked(function):
  for mark in real:
    function = mark(function)
  return function


def need(kind: str) -> None:
  if kind == "namespaces" and rooms.no_namespaces():
    pytest.skip(f"no namespaces: {rooms.no_namespaces()}")


@pytest.fixture
def directory():
  path = pathlib.Path("/tmp") / f"xs-{os.getpid()}"
  path.mkdir()
  yield path
  assert list(path.iterdir()) == []
  path.rmdir()


def said(room, *command: str) -> str:
  """Returns the output of a command in the room."""
  marker = f"{room.inside_tmp}/done"
  text = 'out="$1"; shift; "$@" > "$out" 2>&1; echo ok > "$out.ok"'
  room.run(("sh", "-c", text, "sh", marker, *command), log="command.log")
  for _ in range(3000):
    if (room.tmp / "done.ok").exists():
      output = (room.tmp / "done").read_text(errors="replace")
      (room.tmp / "done.ok").unlink()
      return output
    time.sleep(0.02)
  raise AssertionError(f"{command} did not end; {room.last_words()}")


def gone(pid: int, kind: str) -> bool:
  """Whether it ends within 2 s: a killed process is a moment on its way out.

  Without namespaces, the dead wait for the machine's init to notice.
  """
  due = time.monotonic() + 2
  while pathlib.Path(f"/proc/{pid}").exists():
    if kind == "processes" and processes.is_zombie(pid):
      return True
    if time.monotonic() > due:
      return False
    time.sleep(0.005)
  return True


# --- what programs can reach --------------------------------------------------


@marked
def test_a_namespace_hides_the_machine(directory, monkeypatch):
  need("namespaces")
  monkeypatch.setenv("SECRET_TOKEN", "hunter2")
  room = rooms.Room(isolation="namespaces", directory=directory)
  try:
    assert "hunter2" not in said(room, "env")
    assert said(room, "id", "-u").strip() == "1000"
    # No file of the machine's but programs, and none of this clone.
    shown = said(room, "ls", "-A", "/").split()
    assert set(shown) <= {
        "bin", "dev", "etc", "home", "lib", "lib32", "lib64", "proc", "sbin",
        "tmp", "usr", "var",
    }  # fmt: skip
    assert "shadow" not in said(room, "ls", "-A", "/etc").split()
    assert "No such file" in said(room, "ls", str(ROOT))
    for path in ("/usr/bin/x", "/etc/x", f"{room.inside_etc}/x"):
      assert "Read-only" in said(room, "touch", path)
    # No way out, no other process, no power, no further namespace.
    interfaces = said(room, "cat", "/proc/net/dev").splitlines()[2:]
    assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]
    pids = [p for p in said(room, "ls", "/proc").split() if p.isdigit()]
    assert len(pids) <= 6
    status = said(room, "cat", "/proc/self/status")
    assert "CapEff:\t0000000000000000" in status
    assert "CapBnd:\t0000000000000000" in status
    assert "unshare failed" in said(room, "unshare", "-r", "true")
  finally:
    room.close()


# Each way out, and the line "open" for one that leads somewhere.
_WAYS_OUT = r"""
use Socket qw(:DEFAULT inet_pton pack_sockaddr_in6);
sub way { my ($name, $family, $type, $address) = @_;
  my $s; socket($s, $family, $type, 0) or return print "$name: no socket\n";
  my $out = $type == SOCK_DGRAM ? defined(send($s, "x", 0, $address))
                                : connect($s, $address);
  print "$name: ", ($out ? "open" : "$!"), "\n"; }
my ($port, $path, $abstract) = @ARGV;
sub in4 { pack_sockaddr_in($_[0], inet_aton($_[1])) }
sub in6 { pack_sockaddr_in6($_[0], inet_pton(AF_INET6, $_[1])) }
way("ipv4", AF_INET, SOCK_STREAM, in4($port, "127.0.0.1"));
way("ipv6", AF_INET6, SOCK_STREAM, in6($port, "::1"));
way("gateway", AF_INET, SOCK_STREAM, in4(80, "10.0.0.1"));
way("metadata", AF_INET, SOCK_STREAM, in4(80, "169.254.169.254"));
way("dns", AF_INET, SOCK_DGRAM, in4(53, "8.8.8.8"));
way("dns6", AF_INET6, SOCK_DGRAM, in6(53, "2001:4860:4860::8888"));
way("file", AF_UNIX, SOCK_STREAM, pack_sockaddr_un($path));
way("abstract", AF_UNIX, SOCK_STREAM, pack_sockaddr_un("\0$abstract"));
my $display = pack_sockaddr_un("\0/tmp/.X11-unix/X0");
way("display", AF_UNIX, SOCK_STREAM, $display);
print "raw: ", (socket(my $s, AF_INET, SOCK_RAW, 1) ? "open" : "$!"), "\n";
print "name: ", (gethostbyname("example.com") ? "open" : "none"), "\n";
print "kill: ", (kill(0, $ARGV[3]) ? "open" : "$!"), "\n";
print "done\n";
"""


@marked
def test_no_socket_of_a_namespace_leads_out_of_it(directory):
  need("namespaces")
  name = f"tunix-test-{os.getpid()}"
  path = f"/tmp/{name}.socket"
  with (
    socket.create_server(("127.0.0.1", 0)) as ipv4,
    socket.socket(socket.AF_UNIX) as file,
    socket.socket(socket.AF_UNIX) as abstract,
  ):
    port = ipv4.getsockname()[1]
    file.bind(path)
    abstract.bind(f"\0{name}")
    for listening in (file, abstract):
      listening.listen()
    room = rooms.Room(isolation="namespaces", directory=directory)
    try:
      (room.tmp / "ways.pl").write_text(_WAYS_OUT)
      arguments = (str(port), path, name, str(os.getpid()))
      ways = said(room, "perl", "/tmp/ways.pl", *arguments).splitlines()
      assert ways[-1] == "done" and len(ways) == 13, ways
      assert not [line for line in ways if line.endswith("open")]
      # Nor do the processes of another room, or their windows, exist in it.
      other = rooms.Room(isolation="namespaces", directory=directory)
      try:
        other.run(("sleep", "1000"), log="sleep.log")
        names = said(room, "sh", "-c", "cat /proc/[0-9]*/comm").split()
        assert "sh" in names and "sleep" not in names
        assert other.alive
      finally:
        other.close()
    finally:
      room.close()
    # The same ways are open to a program outside of a namespace.
    (directory / "ways.pl").write_text(_WAYS_OUT)
    free = subprocess.run(
      ["perl", directory / "ways.pl", *arguments],
      capture_output=True,
      text=True,
      timeout=60,
      check=True,
    ).stdout
    (directory / "ways.pl").unlink()
    os.unlink(path)
    for way in ("ipv4", "file", "abstract", "kill"):
      assert f"{way}: open" in free


@marked
@pytest.mark.parametrize("kind", KINDS)
def test_what_hides_from_the_end_is_ended(directory, kind):
  """Orphans in sessions of their own, that ignore every signal they can."""
  need(kind)
  room = rooms.Room(isolation=kind, directory=directory)
  stubborn = "trap '' TERM HUP INT; setsid sh -c 'sleep 1000 & sleep 1000' &"
  pids = []
  try:
    said(room, "sh", "-c", f"for i in 1 2 3 4 5 6 7 8; do {stubborn} done")
    due = time.monotonic() + 20
    while len(pids) < 16 and time.monotonic() < due:
      time.sleep(0.02)
      pids = room.pids()
    assert len(pids) >= 16
  finally:
    room.close()
  assert all(gone(pid, kind) for pid in pids)


@marked
@pytest.mark.parametrize("kind", KINDS)
def test_programs_have_limits_and_an_environment_of_their_own(directory, kind):
  need(kind)
  room = rooms.Room(
    isolation=kind,
    directory=directory,
    limits=rooms.Limits(files=99, file_size=1 << 20),
  )
  try:
    limits = said(room, "cat", "/proc/self/limits")
    assert "Max open files            99 " in limits
    assert "Max core file size        0 " in limits
    said(room, "sh", "-c", "head -c 9000000 /dev/zero > ~/large")
    assert (room.home / "large").stat().st_size == 1 << 20
    names = {line.split("=")[0] for line in said(room, "env").splitlines()}
    assert names - {"PWD", "OLDPWD", "_", "SHLVL"} == set(room.environment())
  finally:
    room.close()


_BOMB = r"""
my $made = 0;
while (1) { my $pid = fork(); last unless defined $pid;
            if (!$pid) { sleep 1000 while 1 } $made++ }
print "$made and then $!\n";
"""


@marked
def test_a_namespace_has_so_many_processes_and_no_more(directory):
  need("namespaces")
  room = rooms.Room(
    isolation="namespaces",
    directory=directory,
    limits=rooms.Limits(processes=100),
  )
  try:
    (room.tmp / "bomb.pl").write_text(_BOMB)
    count, _, why = said(room, "perl", "/tmp/bomb.pl").partition(" and then ")
    assert 50 < int(count) <= 100 and "unavailable" in why
    assert len(room.pids()) <= 110
    # One that goes on and on ends with the room.
    room.run(("sh", "-c", "f() { f | f & }; f"), log="bomb.log")
    time.sleep(0.3)
    assert len(room.pids()) <= 110
  finally:
    room.close()


@marked
def test_a_namespace_has_so_much_disk_and_no_more(directory):
  need("namespaces")
  size = 16 << 20
  room = rooms.Room(
    isolation="namespaces", directory=directory, limits=rooms.Limits(disk=size)
  )
  try:
    free = lambda path: os.statvfs(path).f_blocks * os.statvfs(path).f_frsize
    assert free(room.home) + free(room.tmp) < size
    text = (
      "for d in /home/user /dev/shm /dev / /etc /usr/share /run /tmp; do"
      " head -c 99000000 /dev/zero > $d/fill; done 2> /dev/null;"
      " all=$(du -cbs /home/user /tmp /dev/shm | tail -1 | cut -f1);"
      " rm /tmp/fill; echo $all"
    )
    assert size // 2 < int(said(room, "sh", "-c", text)) < size + 4096
    assert "I/O error" in said(room, "sh", "-c", "echo x > /dev/shm/more")
    for place in ("/dev", "/", "/etc", "/usr/share"):
      assert "Read-only" in said(room, "touch", f"{place}/x")
  finally:
    room.close()
  assert not list(pathlib.Path("/sys/fs/cgroup").glob(f"*/{room.path.name}"))


def test_less_than_namespaces_has_to_be_asked_for(monkeypatch):
  monkeypatch.setattr(rooms, "no_namespaces", lambda: "not allowed")
  assert rooms.resolve_isolation("processes") == "processes"
  for isolation in ("auto", "namespaces"):
    with pytest.raises(
      sandbox_errors.IsolationUnavailable, match="'processes'"
    ):
      rooms.resolve_isolation(isolation)
  monkeypatch.setattr(programs, "missing", lambda: ())
  with pytest.raises(config_lib.ConfigError) as caught:
    config_lib.load_config(("gym=xdesktop",))
  assert "gym.options.isolation='auto'" in str(caught.value)
  config_lib.load_config(("gym=xdesktop", "gym.options.isolation=processes"))


# --- what they leave ----------------------------------------------------------


@marked
@pytest.mark.parametrize("kind", KINDS)
def test_two_desktops_share_nothing_and_leave_nothing(directory, kind):
  need(kind)
  sockets = set(pathlib.Path("/tmp").glob(".X11-unix/*"))
  pair = [
    desktops.Desktop(800, 600, isolation=kind, directory=directory, launch_s=60)
    for _ in range(2)
  ]
  try:
    for number, desktop in enumerate(pair):
      desktop.start()
      assert desktop.room.isolation == kind
      (desktop.room.home / f"{number}.txt").write_text("x")
      desktop.open("terminal")
    pids = [set(desktop.room.pids()) for desktop in pair]
    assert all(len(group) >= 4 for group in pids) and not pids[0] & pids[1]
    for number, desktop in enumerate(pair):
      assert len(desktop.display.windows()) == 1
      assert [p.name for p in desktop.room.home.glob("*.txt")] == [
        f"{number}.txt"
      ]
    # One that has left its group and session is found as well.
    pair[0].room.run(("setsid", "-f", "sleep", "1000"), log="sleep.log")
  finally:
    for desktop in pair:
      desktop.close()
      desktop.close()
  assert all(gone(pid, kind) for group in pids for pid in group)
  assert set(pathlib.Path("/tmp").glob(".X11-unix/*")) <= sockets


@marked
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_owner_takes_its_desktop_along(directory, kind):
  need(kind)
  script = f"""
import sys, types
# Without google-tunix's __init__, which imports JAX.
for name in ("tunix", "tunix.rl"):
  sys.modules[name] = types.ModuleType(name)
  sys.modules[name].__path__ = [{str(ROOT)!r} + "/" + name.replace(".", "/")]
from cua_gyms.xdesktop import desktop
made = desktop.Desktop(
    800, 600, isolation={kind!r}, directory={str(directory)!r}, launch_s=60
)
made.start()
print(made.room.path, *made.room.pids(), flush=True)
sys.stdin.read()
"""
  owner = subprocess.Popen(
    [sys.executable, "-c", script],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    path, *pids = owner.stdout.readline().split()
    assert len(pids) >= 3
  finally:
    owner.kill()
    owner.communicate()
  due = time.monotonic() + 30
  alive = [int(pid) for pid in pids]
  while alive and time.monotonic() < due:
    time.sleep(0.05)
    alive = [pid for pid in alive if not gone(pid, kind)]
  assert not alive
  display = files.read_text(pathlib.Path(path), "display", "")
  assert bool(display) == (kind == "processes")
  os.utime(path, (0, 0))  # As when some time has passed.
  rooms._SWEPT.discard(directory)
  other = rooms.Room(isolation=kind, directory=directory)
  assert not pathlib.Path(path).exists() and other.path.exists()
  other.close()
  if display:
    number, socket = display.split()
    assert rooms.socket_identity(int(number)) != socket


# --- errors -------------------------------------------------------------------


@marked
def test_an_application_without_a_window_is_a_typed_error(directory):
  desktop = desktops.Desktop(800, 600, directory=directory, launch_s=60)
  try:
    desktop.start()
    desktop._launch_s = 0.5
    with pytest.raises(sandbox_errors.AppNotShown) as caught:
      desktop.open("editor", "--version")
    assert "Mousepad 0" in str(caught.value)  # What it said instead.
    with pytest.raises(ValueError, match="did you mean 'editor'"):
      desktop.open("editr")
  finally:
    desktop.close()
  with pytest.raises(sandbox_errors.DesktopLost):
    desktop.open("editor")


@marked
def test_what_does_not_come_up_is_a_typed_error_and_leaves_nothing(directory):
  desktop = desktops.Desktop(800, 600, directory=directory, launch_s=0.001)
  with pytest.raises(
    sandbox_errors.LaunchError, match="did not come up in 0.001 s"
  ):
    desktop.start()
  assert not desktop.alive


def test_what_is_missing_is_named_with_what_installs_it(monkeypatch):
  monkeypatch.setattr(rooms, "SEARCH", "/nowhere")
  with pytest.raises(
    sandbox_errors.ProgramsNotFound, match="Xvfb.*make desktop"
  ):
    desktops.Desktop(800, 600)


def test_a_directory_that_cannot_be_is_named(tmp_path):
  if not xdesktop.missing():
    with pytest.raises(ValueError, match="too long for a socket"):
      desktops.Desktop(800, 600, directory=tmp_path / ("x" * 80))
  with pytest.raises(ValueError, match="cannot hold a desktop"):
    rooms.Room(isolation="processes", directory="/nowhere")
  with pytest.raises(ValueError, match="isolation must be one of auto"):
    rooms.Room(isolation="vm")


# --- files and keys -----------------------------------------------------------


def test_no_link_of_a_program_is_followed(tmp_path):
  (tmp_path / "secret").write_text("s")
  home = tmp_path / "home"
  (home / "real").mkdir(parents=True)
  (home / "real" / "f").write_text("x" * (2 << 20))
  (home / "link").symlink_to(tmp_path / "secret")
  (home / "folder").symlink_to(tmp_path)
  os.mkfifo(home / "pipe")
  for name in ("link", "folder/secret", "../secret", "pipe", "absent"):
    assert files.read_text(home, name, "none") == "none"
  assert len(files.read_text(home, "real/f", "none")) == 1 << 20


def test_a_directory_that_refuses_is_removed_all_the_same(tmp_path):
  inner = tmp_path / "room" / "a" / "b"
  inner.mkdir(parents=True)
  (inner / "f").write_text("x")
  (inner / "link").symlink_to(tmp_path)
  inner.chmod(0o000)
  (tmp_path / "room" / "a").chmod(0o500)
  files.remove(tmp_path / "room")
  assert not (tmp_path / "room").exists() and tmp_path.exists()


def test_keys_are_found_by_any_name_and_characters_borrow_unused_ones():
  # Codes 8..: a/A, 1/!, Shift, and two that give nothing.
  keys = keyboard.Keyboard(
    8, 2, [0x61, 0x41, 0x31, 0x21, 0xFFE1, 0, 0, 0, 0, 0]
  )
  assert keys.key("Shift_L") == keyboard.Stroke(10) and keys.shift == 10
  assert keys.key("A").code == 8
  (batch,) = keys.text("aA!é")
  assert [(s.code, s.shift, s.keysym) for s in batch] == [
    (8, False, 0),
    (8, True, 0),
    (9, True, 0),
    (11, False, 0xE9),
  ]
  batches = keys.text("éλ✓é")  # Three of them, two keys to lend.
  assert [[s.keysym for s in batch] for batch in batches] == [
    [0xE9, 0x10003BB],
    [0x1002713, 0xE9],
  ]
  # A key that lent a character keeps it until it is its turn again.
  ((stroke,),) = keys.text("ñ")
  assert (stroke.code, stroke.keysym) == (11, 0xF1)
  assert [s.code for s in keys.text("éñé")[0]] == [12, 11, 12]
  with pytest.raises(keyboard.UnknownKey):
    keys.text("✓\x07")
  assert keys.text("ñ")[0][0].code == 11
  for name in ("q", "hyper", ""):
    with pytest.raises(keyboard.UnknownKey):
      keys.key(name)
