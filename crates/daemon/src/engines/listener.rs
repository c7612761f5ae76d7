//! The Unix socket: bound, replaced when its daemon is dead, and accepted from.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvferry_control::{Fault, FrameWriter, Response};
use kvferry_handshake::encode;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::{UnixListener, UnixStream};

use super::session::{self, Reception};

/// Why the socket cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another daemon serves it.
    #[error(
        "another kvferryd serves {}: it holds {}; stop it, or choose another socket", socket.display(), lock.display()
    )]
    Taken {
        /// The socket.
        socket: PathBuf,
        /// The file that is locked.
        lock: PathBuf,
    },
    /// Something else serves it.
    #[error(
        "{} is served by another program, no kvferryd with this socket{}; stop it, or choose another socket",
        socket.display(), process.map_or_else(String::new, |pid| format!(": process {pid}"))
    )]
    Foreign {
        /// The socket.
        socket: PathBuf,
        /// Who listens, where that can be told.
        process: Option<i32>,
    },
    /// Something else lies there.
    #[error("{} is not a socket; remove it, or choose another path", socket.display())]
    NotASocket {
        /// The path.
        socket: PathBuf,
    },
    /// The system refused.
    #[error("{what} {}: {cause}", path.display())]
    System {
        /// What was tried.
        what: &'static str,
        /// On which path.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
}

/// The bound socket. Dropping it removes the socket; the lock goes with the process at the latest.
#[derive(Debug)]
pub(crate) struct EngineListener {
    listener: UnixListener,
    path: PathBuf,
    _lock: OwnedFd,
}

impl EngineListener {
    /// Takes the lock, and puts a new socket in the place of one whose daemon is dead.
    pub(crate) fn bind(path: &Path, mode: u32) -> Result<EngineListener, ListenError> {
        // Looked at before anything is made beside it, and again once nobody else may.
        not_in_the_way(path)?;
        let system = |what, path: &Path| {
            let path = path.to_owned();
            move |cause: io::Error| ListenError::System { what, path, cause }
        };
        if let Some(directory) = path
            .parent()
            .filter(|directory| !directory.as_os_str().is_empty())
        {
            std::fs::create_dir_all(directory).map_err(system("making the directory", directory))?;
        }
        let lock_path = with_suffix(path, ".lock");
        let lock = rustix::fs::open(
            &lock_path,
            OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW,
            Mode::RUSR | Mode::WUSR,
        )
        .map_err(|cause| system("opening", &lock_path)(cause.into()))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(ListenError::Taken {
                    socket: path.to_owned(),
                    lock: lock_path,
                });
            }
            Err(cause) => return Err(system("locking", &lock_path)(cause.into())),
        }
        not_in_the_way(path)?;
        not_served(path)?;
        // Bound beside its place and moved there when it has its mode: nobody finds it half made.
        let fresh = with_suffix(path, ".new");
        not_in_the_way(&fresh)?;
        match std::fs::remove_file(&fresh) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
                return Err(system("removing", &fresh)(cause));
            }
            _ => {}
        }
        let listener = UnixListener::bind(&fresh).map_err(system("binding", &fresh))?;
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(&fresh, permissions).map_err(system("setting the mode of", &fresh))?;
        std::fs::rename(&fresh, path).map_err(system("moving the new socket to", path))?;
        Ok(EngineListener {
            listener,
            path: path.to_owned(),
            _lock: lock,
        })
    }
}

impl Drop for EngineListener {
    fn drop(&mut self) {
        // A missing socket is what is wanted; any other trouble is the next start's to report.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Whatever is no socket is not ours to replace.
fn not_in_the_way(path: &Path) -> Result<(), ListenError> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => Err(ListenError::NotASocket {
            socket: path.to_owned(),
        }),
        _ => Ok(()),
    }
}

/// A socket that answers is not ours to replace, either, whoever holds the lock.
fn not_served(path: &Path) -> Result<(), ListenError> {
    let looking = |cause: Errno| ListenError::System {
        what: "looking whether something serves",
        path: path.to_owned(),
        cause: cause.into(),
    };
    let address = SocketAddrUnix::new(path).map_err(looking)?;
    // One whose backlog is full must not be waited for.
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let probe = probe.map_err(looking)?;
    let process = match rustix::net::connect(&probe, &address) {
        // Nothing is there, or nobody listens any more.
        Err(Errno::NOENT | Errno::CONNREFUSED) => return Ok(()),
        Ok(()) => rustix::net::sockopt::socket_peercred(&probe)
            .ok()
            .map(|peer| peer.pid.as_raw_nonzero().get()),
        // Its backlog is full, or it is of another type: served.
        Err(Errno::AGAIN | Errno::PROTOTYPE) => None,
        Err(cause) => return Err(looking(cause)),
    };
    Err(ListenError::Foreign {
        socket: path.to_owned(),
        process,
    })
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Accepts engines until it is dropped.
pub(crate) async fn accept(listener: Arc<EngineListener>, reception: Arc<Reception>) {
    loop {
        match listener.listener.accept().await {
            Ok((stream, _)) => match reception.admit(&stream) {
                Ok(seat) => drop(tokio::spawn(session::run(stream, seat, Arc::clone(&reception)))),
                Err(fault) => refuse(&stream, fault),
            },
            Err(error) => {
                // Out of fds, most likely: those that there are go on, and new ones wait in the backlog.
                let what = "accepting an engine failed";
                if reception.floods.admit(what, None) {
                    tracing::warn!(%error, "{what}");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Says why, as far as the fresh socket's buffer takes it, and closes.
fn refuse(stream: &UnixStream, fault: Fault) {
    let mut writer = FrameWriter::new();
    if let Ok(frame) = encode(&Response::Hello(Err(fault)))
        && writer.push(frame, None).is_ok()
    {
        let _ = writer.write(stream);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_live_socket_is_refused_and_a_dead_one_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deeper/kvferryd.sock");
        let first = EngineListener::bind(&path, 0o640).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        let error = EngineListener::bind(&path, 0o600).unwrap_err();
        assert!(
            error.to_string().starts_with("another kvferryd serves"),
            "{error}"
        );
        std::os::unix::net::UnixStream::connect(&path).unwrap();
        drop(first);
        assert!(!path.exists());
        // A daemon that was killed leaves its socket, and half made ones.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        drop(std::os::unix::net::UnixListener::bind(with_suffix(&path, ".new")).unwrap());
        let second = EngineListener::bind(&path, 0o600).unwrap();
        std::os::unix::net::UnixStream::connect(&path).unwrap();
        drop(second);
    }

    #[tokio::test]
    async fn a_socket_that_another_program_serves_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("theirs.sock");
        let theirs = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let refused = || EngineListener::bind(&path, 0o600).unwrap_err().to_string();
        let error = refused();
        let process = format!("process {}", std::process::id());
        assert!(
            error.contains("theirs.sock is served by another program") && error.contains(&process),
            "{error}"
        );
        theirs.accept().unwrap();
        // It accepts nobody, until its backlog is full.
        rustix::net::listen(&theirs, 0).unwrap();
        let waiting = std::os::unix::net::UnixStream::connect(&path).unwrap();
        let error = refused();
        assert!(error.contains("is served by another program"), "{error}");
        drop((waiting, theirs));
        std::fs::remove_file(&path).unwrap();
        let datagrams = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
        let error = refused();
        assert!(error.contains("is served by another program"), "{error}");
        drop(datagrams);
        drop(EngineListener::bind(&path, 0o600).unwrap());
    }

    #[tokio::test]
    async fn a_file_in_its_place_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("precious");
        std::fs::write(&path, "data").unwrap();
        let error = EngineListener::bind(&path, 0o600).unwrap_err();
        assert!(error.to_string().contains("is not a socket"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"data");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
