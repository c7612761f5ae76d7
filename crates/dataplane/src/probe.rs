//! Whether an engine's own memory can be reached, found out when it is registered.

use std::fs;

use kvferry_handshake::Code;

use crate::RegisterError;
use crate::process::{EngineProcess, Remote};

/// Checks that `[address, address + len)` of the process can be read and written, all of it.
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
    let Ok(maps) = fs::read_to_string(format!("/proc/{}/maps", process.pid())) else {
        return Ok(());
    };
    match first_unfit(&maps, address, end) {
        None => Ok(()),
        Some(hole) => Err(bounds(format!(
            "address {hole:#x}, inside {address:#x} to {end:#x}, is not mapped readable and writable in process {}; give a \
             range that is",
            process.pid()
        ))),
    }
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
                "reading memory of process {pid} failed: {error}; hand over a memfd, or run daemon and engine as one user \
                 with ptrace allowed (CAP_SYS_PTRACE, or kernel.yama.ptrace_scope = 0)"
            );
            RegisterError::new(Code::RegionUnreachable, message)
        }
    }
}

/// The first address in `[address, end)` that `/proc/PID/maps` (proc_pid_maps(5)) does not show as readable and
/// writable.
fn first_unfit(maps: &str, address: u64, end: u64) -> Option<u64> {
    let mut at = address;
    for line in maps.lines() {
        let mut fields = line.split(' ');
        let (Some(range), Some(permissions)) = (fields.next(), fields.next()) else {
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
            return Some(at);
        }
        at = to;
        if at >= end {
            return None;
        }
    }
    Some(at)
}

#[cfg(test)]
mod tests {
    use super::{first_unfit, reachable, refusal};
    use crate::process::EngineProcess;
    use kvferry_handshake::Code;
    use std::io::Error;

    const MAPS: &str = "1000-3000 rw-p 00000000 00:00 0 \n3000-4000 rw-s 00000000 00:01 5 /memfd:a\n\
                        5000-6000 rw-p 00000000 00:00 0\n6000-7000 r--p 00000000 00:00 0\n";

    #[test]
    fn a_range_over_neighbours_is_whole() {
        assert_eq!(first_unfit(MAPS, 0x1000, 0x4000), None);
        assert_eq!(first_unfit(MAPS, 0x2fff, 0x3001), None);
    }

    #[test]
    fn holes_and_read_only_memory_are_found() {
        assert_eq!(first_unfit(MAPS, 0x0, 0x2000), Some(0x0));
        assert_eq!(first_unfit(MAPS, 0x3000, 0x4001), Some(0x4000));
        assert_eq!(first_unfit(MAPS, 0x5800, 0x6001), Some(0x6000));
        assert_eq!(first_unfit(MAPS, 0x8000, 0x8001), Some(0x8000));
    }

    #[test]
    fn refusals_say_what_to_do() {
        let refused = |errno| refusal(7, 0x1000, &Error::from_raw_os_error(errno));
        assert_eq!(refused(libc::EFAULT).code(), Code::RegionOutOfBounds);
        assert_eq!(refused(libc::ESRCH).code(), Code::RegionUnreachable);
        let denied = refused(libc::EPERM);
        assert_eq!(denied.code(), Code::RegionUnreachable);
        assert!(denied.to_string().contains("ptrace_scope"), "{denied}");
    }

    #[test]
    fn a_process_of_another_pid_namespace_is_refused() {
        let refused = reachable(&EngineProcess::unseen(), 0x1000, 1).unwrap_err();
        assert_eq!(refused.code(), Code::RegionUnreachable);
        assert!(refused.to_string().contains("PID namespace"), "{refused}");
    }
}
