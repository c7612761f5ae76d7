//! A TCP proxy before a data port, which does to connections what networks do.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::HOST;

/// What happens to a connection after so many bytes from the sender.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Spell {
    Nothing,
    /// Both ends are cut.
    Cut(u64),
    /// Bytes are taken no more.
    Stall(u64),
    /// Bytes trickle, some hundred KB a second, until the proxy is told to hurry.
    Slow,
    /// A bit is flipped.
    Corrupt(u64),
    /// What comes back from the receiver is dropped, but for its answer to hello.
    Mute,
    /// A bit is flipped each so many bytes.
    CorruptEach(u64),
    /// The sender's end is cut; what it sent goes on to the receiver, slowly.
    Linger(u64),
}

pub(crate) struct Proxy {
    pub(crate) port: u16,
    /// Connections so far.
    pub(crate) connections: Arc<AtomicU64>,
    /// Slow connections are so no longer.
    pub(crate) hurry: Arc<AtomicBool>,
    ending: Arc<AtomicBool>,
}

/// What a slow connection holds in its kernel.
const SLOW_BUFFER: usize = 64 << 10;

impl Proxy {
    /// `spell` says what happens to the n-th connection.
    pub(crate) fn new(target: SocketAddr, spell: impl Fn(u64) -> Spell + Send + 'static) -> Proxy {
        let listener = TcpListener::bind((HOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let connections = Arc::new(AtomicU64::new(0));
        let ending = Arc::new(AtomicBool::new(false));
        let (counted, ended) = (Arc::clone(&connections), Arc::clone(&ending));
        let hurry = Arc::new(AtomicBool::new(false));
        let hurried = Arc::clone(&hurry);
        std::thread::spawn(move || {
            for near in listener.incoming() {
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                let (Ok(near), Ok(far)) = (near, TcpStream::connect(target)) else {
                    continue;
                };
                let spell = spell(counted.fetch_add(1, Ordering::Relaxed));
                join(near, far, spell, &ended, &hurried);
            }
        });
        Proxy {
            port,
            connections,
            hurry,
            ending,
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::Relaxed);
        self.hurry.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect((HOST, self.port));
    }
}

fn join(near: TcpStream, far: TcpStream, spell: Spell, ending: &Arc<AtomicBool>, hurry: &Arc<AtomicBool>) {
    if matches!(spell, Spell::Slow) {
        rustix::net::sockopt::set_socket_recv_buffer_size(&near, SLOW_BUFFER).unwrap();
    }
    let (back_from, back_to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
    std::thread::spawn(move || {
        let (mut from, mut to) = (back_from, back_to);
        if matches!(spell, Spell::Mute) {
            let mut answer = [0; 8];
            let _ = from.read_exact(&mut answer).and_then(|()| to.write_all(&answer));
            let _ = std::io::copy(&mut from, &mut std::io::sink());
        }
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
    });
    let (ending, hurry) = (Arc::clone(ending), Arc::clone(hurry));
    std::thread::spawn(move || {
        let (mut near, mut far) = (near, far);
        let _ = forward(&mut near, &mut far, spell, &ending, &hurry);
        let _ = near.shutdown(Shutdown::Both);
        let _ = far.shutdown(Shutdown::Both);
    });
}

fn forward(
    near: &mut TcpStream,
    far: &mut TcpStream,
    spell: Spell,
    ending: &AtomicBool,
    hurry: &AtomicBool,
) -> std::io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    let mut passed = 0u64;
    loop {
        let len = near.read(&mut buffer)?;
        if len == 0 {
            return Ok(());
        }
        let bytes = &mut buffer[..len];
        let before = passed;
        passed += len as u64;
        let reached = |at: u64| (before..passed).contains(&at).then(|| (at - before) as usize);
        match spell {
            Spell::Nothing | Spell::Mute => {}
            Spell::Slow => {
                for part in bytes.chunks(4096) {
                    if !hurry.load(Ordering::Relaxed) {
                        std::thread::sleep(Duration::from_millis(8));
                    }
                    far.write_all(part)?;
                }
                continue;
            }
            Spell::Cut(at) => {
                if let Some(at) = reached(at) {
                    return far.write_all(&bytes[..at]);
                }
            }
            Spell::Stall(at) => {
                if reached(at).is_some() {
                    while !ending.load(Ordering::Relaxed) {
                        std::thread::sleep(Duration::from_millis(10));
                    }
                    return Ok(());
                }
            }
            Spell::Corrupt(at) => {
                if let Some(at) = reached(at) {
                    bytes[at] ^= 0x10;
                }
            }
            Spell::CorruptEach(each) => {
                if passed / each != before / each {
                    bytes[0] ^= 0x10;
                }
            }
            Spell::Linger(at) => {
                if reached(at).is_some() {
                    near.shutdown(Shutdown::Both)?;
                    for part in bytes.chunks(4096) {
                        std::thread::sleep(Duration::from_millis(20));
                        far.write_all(part)?;
                    }
                    return Ok(());
                }
            }
        }
        far.write_all(bytes)?;
    }
}
