//! What memory is refused, by which code, and with what to do.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use kvferry_dataplane::{Config, DataPlane, EngineProcess, RegisterError};
use kvferry_handshake::Code;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create, open};

use crate::pair::{self, sealed};

const PAGE: u64 = 4096;

fn plane() -> DataPlane {
    DataPlane::start(Config::default(), Arc::new(|_| {})).unwrap()
}

fn memfd(len: u64, seals: SealFlags) -> OwnedFd {
    let fd = memfd_create("kvferry-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, len).unwrap();
    fcntl_add_seals(&fd, seals).unwrap();
    fd
}

/// Checks a refusal's code, and that its message says these things.
fn refused<T: std::fmt::Debug>(result: Result<T, RegisterError>, code: Code, says: &[&str]) {
    let error = result.unwrap_err();
    assert_eq!(error.code(), code, "{error}");
    let message = error.to_string();
    for part in says {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
}

#[test]
fn seals_that_do_not_fit_are_named() {
    let plane = plane();
    let both = SealFlags::SHRINK | SealFlags::GROW;
    let wrong: [(SealFlags, &[&str]); 5] = [
        (
            SealFlags::empty(),
            &["F_SEAL_SHRINK, F_SEAL_GROW missing", "has: none"],
        ),
        (SealFlags::SHRINK, &["F_SEAL_GROW missing", "has: F_SEAL_SHRINK"]),
        (SealFlags::GROW, &["F_SEAL_SHRINK missing"]),
        (both | SealFlags::WRITE, &["F_SEAL_WRITE must not be there"]),
        (
            both | SealFlags::FUTURE_WRITE,
            &["F_SEAL_FUTURE_WRITE must not be there"],
        ),
    ];
    for (seals, says) in wrong {
        refused(
            plane.map_memfd(1, memfd(PAGE, seals), 0, PAGE),
            Code::RegionSeals,
            says,
        );
    }
    let unsealable = memfd_create("kvferry-test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&unsealable, PAGE).unwrap();
    refused(
        plane.map_memfd(1, unsealable, 0, PAGE),
        Code::RegionSeals,
        &["MFD_ALLOW_SEALING"],
    );
    assert_eq!(pair::count(&plane.counts(), "regions"), 0);
}

#[test]
fn other_fds_than_memfds_are_named() {
    let plane = plane();
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(PAGE).unwrap();
    let (socket, _other) = UnixStream::pair().unwrap();
    let directory = File::open("/").unwrap();
    for fd in [OwnedFd::from(file), socket.into(), directory.into()] {
        refused(
            plane.map_memfd(1, fd, 0, PAGE),
            Code::RegionKind,
            &["exactly one memfd"],
        );
    }
    let writable = sealed(PAGE);
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&writable));
    let read_only = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    refused(
        plane.map_memfd(1, read_only, 0, PAGE),
        Code::RegionKind,
        &["reading and writing"],
    );
}

#[test]
fn memory_that_could_fault_under_the_daemon_is_refused() {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    let fd = memfd_create("kvferry-test", flags).unwrap();
    ftruncate(&fd, 2 << 20).unwrap();
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    refused(
        plane().map_memfd(1, fd, 0, 2 << 20),
        Code::RegionKind,
        &["hugetlb", "MADV_HUGEPAGE"],
    );
}

#[test]
fn an_owner_has_a_bounded_number_of_regions() {
    let plane = plane();
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let process = Arc::new(EngineProcess::of(&ours).unwrap());
    let memory = vec![1u8; 5000];
    let address = memory.as_ptr().addr() as u64;
    let map = |owner, at| plane.map_process(owner, Arc::clone(&process), address + at, 1);
    for at in 0..4096 {
        map(1, at).unwrap();
    }
    refused(map(1, 4096), Code::OverLimit, &["4096"]);
    map(2, 4096).unwrap();
}

#[test]
fn all_owners_together_have_a_bounded_number_of_regions_and_bytes() {
    let config = Config {
        max_regions: 3,
        max_region_bytes: 8 * PAGE,
        ..Config::default()
    };
    let plane = DataPlane::start(config, Arc::new(|_| {})).unwrap();
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let process = Arc::new(EngineProcess::of(&ours).unwrap());
    let bytes = vec![1u8; 8 * PAGE as usize];
    let of_process = |len| plane.map_process(9, Arc::clone(&process), bytes.as_ptr().addr() as u64, len);
    let of_memfd = |owner, pages| plane.map_memfd(owner, sealed(pages * PAGE), 0, pages * PAGE);
    let first = of_memfd(1, 6).unwrap();
    let says = ["limits.registered_bytes", "24576", "32768"];
    refused(of_memfd(2, 3), Code::OverLimit, &says);
    refused(of_process(3 * PAGE), Code::OverLimit, &says);
    let second = of_memfd(2, 1).unwrap();
    let third = of_process(PAGE).unwrap();
    let says = ["limits.regions", "3 are registered"];
    refused(of_memfd(3, 1), Code::OverLimit, &says);
    // What is refused for another reason, or let go, takes no room.
    plane.release(second);
    for _ in 0..8 {
        refused(of_process(PAGE), Code::RegionOverlap, &[]);
        refused(of_memfd(3, 0), Code::RegionOutOfBounds, &[]);
    }
    of_memfd(3, 1).unwrap();
    plane.release(first);
    plane.release(third);
    of_memfd(4, 7).unwrap();
}

#[test]
fn ranges_outside_the_memfd_are_named_with_both_values() {
    let plane = plane();
    let wrong: [(u64, u64, &[&str]); 5] = [
        (0, PAGE * 2 + 1, &["len 8193", "8192"]),
        (PAGE, PAGE * 2, &["offset 4096", "8192"]),
        (u64::MAX - PAGE + 1, PAGE * 2, &["8192"]),
        (0, 0, &["len is 0"]),
        (100, PAGE, &["offset 100", "4096"]),
    ];
    for (offset, len, says) in wrong {
        refused(
            plane.map_memfd(1, sealed(PAGE * 2), offset, len),
            Code::RegionOutOfBounds,
            says,
        );
    }
    plane.map_memfd(1, sealed(PAGE * 2), PAGE, PAGE).unwrap();
    assert_eq!(pair::count(&plane.counts(), "regions"), 1);
    assert_eq!(pair::count(&plane.counts(), "mapped_bytes"), PAGE);
}

#[test]
fn regions_of_one_owner_must_not_share_bytes() {
    let plane = plane();
    let fd = sealed(PAGE * 8);
    let map =
        |owner, offset, len| plane.map_memfd(owner, fd.as_fd().try_clone_to_owned().unwrap(), offset, len);
    let first = map(1, PAGE * 2, PAGE * 2).unwrap();
    for (offset, len) in [(0, PAGE * 3), (PAGE * 3, 1), (PAGE * 2, PAGE * 2), (0, PAGE * 8)] {
        refused(map(1, offset, len), Code::RegionOverlap, &["8192", "16384"]);
    }
    // Neighbours, other owners and other memory do not.
    map(1, 0, PAGE * 2).unwrap();
    map(1, PAGE * 4, PAGE).unwrap();
    map(2, PAGE * 2, PAGE * 2).unwrap();
    plane.map_memfd(1, sealed(PAGE * 8), PAGE * 2, PAGE).unwrap();
    // Nor does what was released.
    plane.release(first);
    map(1, PAGE * 2, PAGE).unwrap();
}

#[test]
fn memory_of_a_process_is_probed() {
    let plane = plane();
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let process = Arc::new(EngineProcess::of(&ours).unwrap());
    let memory = vec![1u8; 1 << 16];
    let address = memory.as_ptr().addr() as u64;
    let map = |address, len| plane.map_process(1, Arc::clone(&process), address, len);
    map(address, 1 << 15).unwrap();
    refused(map(address + 100, 10), Code::RegionOverlap, &[]);
    map(address + (1 << 15), 1 << 15).unwrap();
    refused(map(PAGE, PAGE), Code::RegionOutOfBounds, &["0x1000"]);
    refused(map(address, u64::MAX), Code::RegionOutOfBounds, &[]);
    refused(map(address, 0), Code::RegionOutOfBounds, &["len is 0"]);
    refused(map(address, 1 << 46), Code::RegionOutOfBounds, &[]);
    // Memory that cannot be written is no region either.
    let constant = Vec::<u8>::leak as fn(Vec<u8>) -> &'static mut [u8] as usize as u64;
    refused(map(constant, 16), Code::RegionOutOfBounds, &["writable"]);
}

#[test]
fn a_file_that_a_process_has_mapped_is_no_memory() {
    let plane = plane();
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let process = Arc::new(EngineProcess::of(&ours).unwrap());
    let map = |mapped: &memmap2::MmapMut| {
        let (address, len) = (mapped.as_ptr().addr() as u64, mapped.len() as u64);
        plane.map_process(1, Arc::clone(&process), address, len)
    };
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(4 * PAGE).unwrap();
    // SAFETY: nobody else has these files, and nothing reads the mappings.
    let (shared, private, memfd) = unsafe {
        let options = memmap2::MmapOptions::new();
        (
            options.map_mut(&file).unwrap(),
            options.map_copy(&file).unwrap(),
            options.map_mut(&sealed(4 * PAGE)).unwrap(),
        )
    };
    refused(map(&shared), Code::RegionKind, &["file", "memfd"]);
    refused(map(&private), Code::RegionKind, &["file", "memfd"]);
    map(&memfd).unwrap();
    map(&memmap2::MmapMut::map_anon(4 * PAGE as usize).unwrap()).unwrap();
    assert_eq!(pair::count(&plane.counts(), "regions"), 2);
}

/// Where a child of these tests is to connect. Such a child is this program again, with one test.
const CONNECT_TO: &str = "KVFERRY_TEST_CONNECT_TO";
/// Set: the child hands its socket on to one of its own, and ends.
const HAND_ON: &str = "KVFERRY_TEST_HAND_ON";

/// No test: what a child does.
#[test]
#[expect(
    clippy::zombie_processes,
    reason = "the one it hands on to outlives it, on purpose"
)]
fn child_that_connects() {
    let Some(path) = std::env::var_os(CONNECT_TO) else {
        return;
    };
    let mut socket = UnixStream::connect(path).unwrap();
    if std::env::var_os(HAND_ON).is_some() {
        // Ends when the other end is closed.
        std::process::Command::new("cat")
            .stdin(OwnedFd::from(socket))
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        return;
    }
    let _ = socket.read(&mut [0]);
}

/// A child that connects, and the other end of its socket.
fn child(hands_on: bool) -> (std::process::Child, UnixStream) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("socket");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "registration::child_that_connects"])
        .env(CONNECT_TO, path)
        .stdout(std::process::Stdio::null());
    if hands_on {
        command.env(HAND_ON, "1");
    }
    let child = command.spawn().unwrap();
    (child, listener.accept().unwrap().0)
}

#[test]
fn a_process_that_ended_is_unreachable() {
    let plane = plane();
    let (mut child, socket) = child(false);
    let process = Arc::new(EngineProcess::of(&socket).unwrap());
    assert_eq!(process.pid(), child.id().cast_signed());
    assert!(process.is_alive());
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!process.is_alive());
    let memory = [1u8; 64];
    let address = memory.as_ptr().addr() as u64;
    refused(
        plane.map_process(1, process, address, 64),
        Code::RegionUnreachable,
        &["ended"],
    );
}

/// The socket is open and its process is not: kernels differ in whether they still name it.
#[test]
fn a_socket_that_was_handed_on_names_nobody_else() {
    let (mut child, mut socket) = child(true);
    assert!(child.wait().unwrap().success());
    socket
        .set_read_timeout(Some(std::time::Duration::from_millis(50)))
        .unwrap();
    let open = socket.read(&mut [0]).unwrap_err();
    assert_eq!(
        open.kind(),
        std::io::ErrorKind::WouldBlock,
        "somebody has the other end"
    );
    if let Ok(process) = EngineProcess::of(&socket) {
        assert!(!process.is_alive(), "the child was reaped");
    }
}

#[test]
fn a_peer_that_never_came_up_leaves_nothing() {
    let plane = plane();
    plane.peer_down("nobody:1");
    assert!(plane.traffic().is_empty());
    plane.peer_up("somebody:1", [127, 0, 0, 1].into());
    plane.peer_down("somebody:1");
    assert_eq!(plane.traffic().len(), 1);
}
