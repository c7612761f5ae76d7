//! Whether an engine's own memory can be reached, found out when it is registered.

use std::fs;
use std::sync::OnceLock;

use kvferry_handshake::Code;
use rustix::fs::{MemfdFlags, StatFs, fstat, memfd_create, stat, statfs};

use crate::RegisterError;
use crate::process::{EngineProcess, Remote};

/// `f_type` of tmpfs (statfs(2)).
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

/// Checks that `[address, address + len)` of the process can be read and written, all of it, and is memory: not a file that
/// some server may be slow to give.
pub(crate) fn reachable(process: &EngineProcess, address: u64, len: u64) -> Result<(), RegisterError> {
    let bounds = |message: String| RegisterError::new(Code::RegionOutOfBounds, message);
    let unreachable = |message: String| RegisterError::new(Code::RegionUnreachable, message);
    if process.pid() == 0 {
        return Err(unreachable(
            "address: the engine's process is in another PID namespace, and the daemon cannot see it; hand over a memfd, or \
             run the daemon in the host's PID namespace"
                .to_owned(),
        ));
    }
    // The kernel vouches for the process, not for the program in it. Whoever connects may pass the socket on and then run a
    // setuid program: a daemon that may reach every process would read and write that program's memory for them. A daemon
    // of the same user as the engine is stopped by the kernel there.
    let own = rustix::process::geteuid().as_raw();
    if process.uid() != own {
        return Err(unreachable(format!(
            "address: the engine connected as user {}, and the daemon, of user {own}, takes the memory of a process from its \
             own user only; hand over a memfd",
            process.uid()
        )));
    }
    if len == 0 {
        return Err(bounds("len is 0; register at least one byte".to_owned()));
    }
    let Some(end) = address
        .checked_add(len)
        .filter(|end| usize::try_from(*end).is_ok())
    else {
        return Err(bounds(format!(
            "address {address:#x} plus len {len} is beyond the address space; give a range that is mapped"
        )));
    };
    for address in [address, end - 1] {
        let mut byte = [0u8];
        if let Err(error) = process.read(&[Remote { address, len: 1 }], &mut byte) {
            return Err(refusal(process.pid(), address, &error));
        }
    }
    // Between the ends the process's map tells. Who may read the memory may read the map; should the system forbid
    // it all the same, a hole shows when a transfer meets it, as `memory_fault`.
    let Ok(maps) = fs::read(format!("/proc/{}/maps", process.pid())) else {
        return Ok(());
    };
    let pid = process.pid();
    match first_unfit(&maps, address, end, memory_devices()) {
        None => Ok(()),
        Some(Unfit::Hole(at)) => Err(bounds(format!(
            "address {at:#x}, inside {address:#x} to {end:#x}, is not mapped readable and writable in process {pid}; give a \
             range that is"
        ))),
        Some(Unfit::File(at)) => Err(RegisterError::new(
            Code::RegionKind,
            format!(
                "address {at:#x}, inside {address:#x} to {end:#x}, is a file that process {pid} has mapped, which may be as \
                 slow as its file system; give anonymous memory, a memfd or shared memory"
            ),
        )),
    }
}

/// Devices, as `/proc/PID/maps` writes them, whose files are memory: those of memfds (and shared anonymous memory, and
/// that of System V), small pages and huge, and /dev/shm. A name would not do: any file system can have a `/memfd:a`.
fn memory_devices() -> &'static [String] {
    static FOUND: OnceLock<Vec<String>> = OnceLock::new();
    FOUND.get_or_init(find_memory_devices)
}

fn find_memory_devices() -> Vec<String> {
    let huge = MemfdFlags::HUGETLB;
    let memfds = [
        MemfdFlags::empty(),
        huge,
        huge | MemfdFlags::HUGE_2MB,
        huge | MemfdFlags::HUGE_1GB,
    ];
    let memfds = memfds.into_iter().filter_map(|kind| {
        let fd = memfd_create("kvferry-device", MemfdFlags::CLOEXEC | kind).ok()?;
        fstat(&fd).ok()
    });
    let is_tmpfs = |found: StatFs| found.f_type == TMPFS_MAGIC;
    let shm = statfs("/dev/shm")
        .is_ok_and(is_tmpfs)
        .then(|| stat("/dev/shm").ok());
    memfds
        .chain(shm.flatten())
        .map(|stat| {
            format!(
                "{:02x}:{:02x}",
                rustix::fs::major(stat.st_dev),
                rustix::fs::minor(stat.st_dev)
            )
        })
        .collect()
}

/// What a read that failed means.
fn refusal(pid: i32, address: u64, error: &std::io::Error) -> RegisterError {
    match error.raw_os_error() {
        Some(libc::EFAULT) => {
            let message =
                format!("address {address:#x} is not mapped in process {pid}; give a range that is");
            RegisterError::new(Code::RegionOutOfBounds, message)
        }
        Some(libc::ESRCH) => RegisterError::new(
            Code::RegionUnreachable,
            format!("process {pid} has ended; attach again"),
        ),
        _ => {
            let message = format!(
                "reading memory of process {pid} failed: {error}; hand over a memfd. Where kernel.yama.ptrace_scope is 1, a \
                 process names who may reach its memory (PR_SET_PTRACER, which kvferry's client does); where it is more, \
                 or the process is not dumpable, only a memfd will do"
            );
            RegisterError::new(Code::RegionUnreachable, message)
        }
    }
}

/// Why memory is no region, and where that begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unfit {
    /// Not mapped, or not readable and writable.
    Hole(u64),
    /// A file's.
    File(u64),
}

/// The first of `[address, end)` that `/proc/PID/maps` (proc_pid_maps(5)) does not show as readable and writable memory,
/// which is anonymous or of one of these devices. File names may be any bytes.
fn first_unfit(maps: &[u8], address: u64, end: u64, devices: &[String]) -> Option<Unfit> {
    let mut at = address;
    for line in maps.split(|byte| *byte == b'\n') {
        let mut fields = line.split(|byte| *byte == b' ').map(str::from_utf8);
        let mut field = || fields.next()?.ok();
        // Range, permissions, offset, device, inode.
        let (Some(range), Some(permissions), Some(_), Some(device), Some(inode)) =
            (field(), field(), field(), field(), field())
        else {
            continue;
        };
        let Some((from, to)) = range.split_once('-') else {
            continue;
        };
        let (Ok(from), Ok(to)) = (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16)) else {
            continue;
        };
        if to <= at {
            continue;
        }
        if from > at || !permissions.starts_with("rw") {
            return Some(Unfit::Hole(at));
        }
        let anonymous = (device, inode) == ("00:00", "0");
        if !anonymous && !devices.iter().any(|memory| memory == device) {
            return Some(Unfit::File(at));
        }
        at = to;
        if at >= end {
            return None;
        }
    }
    Some(Unfit::Hole(at))
}

#[cfg(test)]
mod tests {
    use super::{Unfit, first_unfit, reachable, refusal};
    use crate::process::EngineProcess;
    use kvferry_handshake::Code;
    use std::io::Error;

    /// One of the names is not UTF-8.
    const MAPS: &[u8] = b"1000-3000 rw-p 00000000 00:00 0 \n3000-4000 rw-s 00000000 00:01 5 /memfd:a\n\
                         5000-6000 rw-p 00000000 00:00 0\n6000-7000 r--p 00000000 00:00 0\n\
                         7000-8000 rw-s 00000000 00:2a 7 /memfd:\xff\n8000-9000 rw-p 00000000 00:00 0\n";

    fn unfit(address: u64, end: u64) -> Option<Unfit> {
        first_unfit(MAPS, address, end, &["00:01".to_owned()])
    }

    #[test]
    fn a_range_over_neighbours_is_whole() {
        assert_eq!(unfit(0x1000, 0x4000), None);
        assert_eq!(unfit(0x2fff, 0x3001), None);
        assert_eq!(unfit(0x8000, 0x9000), None);
    }

    #[test]
    fn holes_and_read_only_memory_are_found() {
        assert_eq!(unfit(0x0, 0x2000), Some(Unfit::Hole(0x0)));
        assert_eq!(unfit(0x3000, 0x4001), Some(Unfit::Hole(0x4000)));
        assert_eq!(unfit(0x5800, 0x6001), Some(Unfit::Hole(0x6000)));
        assert_eq!(unfit(0x9000, 0x9001), Some(Unfit::Hole(0x9000)));
    }

    #[test]
    fn a_file_is_found_by_its_device_whatever_its_name() {
        assert_eq!(unfit(0x7000, 0x9000), Some(Unfit::File(0x7000)));
    }

    #[test]
    fn refusals_say_what_to_do() {
        let refused = |errno| refusal(7, 0x1000, &Error::from_raw_os_error(errno));
        assert_eq!(refused(libc::EFAULT).code(), Code::RegionOutOfBounds);
        assert_eq!(refused(libc::ESRCH).code(), Code::RegionUnreachable);
        let denied = refused(libc::EPERM);
        assert_eq!(denied.code(), Code::RegionUnreachable);
        assert!(denied.to_string().contains("hand over a memfd"), "{denied}");
        assert!(denied.to_string().contains("PR_SET_PTRACER"), "{denied}");
        // A daemon with this capability would reach more than its own user's.
        assert!(!denied.to_string().contains("CAP_SYS_PTRACE"), "{denied}");
    }

    /// That it is this process, whose memory can be reached, shows that the user alone decides.
    #[test]
    fn a_process_of_another_user_is_refused() {
        let own = rustix::process::geteuid().as_raw();
        let (memory, pid) = ([1u8; 8], std::process::id().cast_signed());
        let address = u64::try_from(memory.as_ptr().addr()).unwrap();
        let probed = |uid| reachable(&EngineProcess::stated(pid, uid), address, 8);
        let refused = probed(own + 1).unwrap_err();
        assert_eq!(refused.code(), Code::RegionUnreachable);
        for part in [
            format!("user {}", own + 1),
            format!("user {own}"),
            "hand over a memfd".to_owned(),
        ] {
            assert!(refused.to_string().contains(&part), "{refused}");
        }
        // Of the own user it gets as far as the process, which has no pidfd here.
        assert!(probed(own).unwrap_err().to_string().contains("has ended"));
    }

    #[test]
    fn a_process_of_another_pid_namespace_is_refused() {
        let refused = reachable(&EngineProcess::stated(0, 0), 0x1000, 1).unwrap_err();
        assert_eq!(refused.code(), Code::RegionUnreachable);
        assert!(refused.to_string().contains("PID namespace"), "{refused}");
    }
}
