//! A TCP connection's way through the test: it can be cut, and bytes on it changed.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::node::free_port;

/// Listens on a port and passes everything on to another one.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    target: u16,
    ended: AtomicBool,
    open: Mutex<Vec<TcpStream>>,
    /// What is done to the bytes; `None`: nothing.
    harm: Mutex<Option<StdRng>>,
    /// What went to the target, one entry a connection.
    seen: Mutex<Vec<Vec<u8>>>,
}

/// Of each connection, so many bytes are kept.
const KEPT: usize = 256 << 10;

impl Proxy {
    /// Passes on to `target`.
    pub fn start(target: u16) -> Proxy {
        let port = free_port();
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let shared = Arc::new(Shared {
            target,
            ended: AtomicBool::new(false),
            open: Mutex::new(Vec::new()),
            harm: Mutex::new(None),
            seen: Mutex::new(Vec::new()),
        });
        let proxy = Proxy {
            port,
            shared: Arc::clone(&shared),
        };
        std::thread::spawn(move || {
            for client in listener.incoming() {
                if shared.ended.load(Ordering::Relaxed) {
                    return;
                }
                // A target that is away: the client's connection closes.
                if let (Ok(client), Ok(server)) = (client, TcpStream::connect(("127.0.0.1", shared.target))) {
                    pass(&shared, client, server);
                }
            }
        });
        proxy
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Cuts every connection.
    pub fn cut(&self) {
        for stream in self.shared.open.lock().unwrap().drain(..) {
            // It may have ended by itself.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// From now on some bytes are changed, dropped or doubled.
    pub fn harm(&self, seed: u64) {
        *self.shared.harm.lock().unwrap() = Some(StdRng::seed_from_u64(seed));
    }

    /// From now on nothing is changed.
    pub fn heal(&self) {
        *self.shared.harm.lock().unwrap() = None;
    }

    /// The first bytes that went to the target, for each connection so far.
    pub fn seen(&self) -> Vec<Vec<u8>> {
        self.shared.seen.lock().unwrap().clone()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        self.cut();
        // Wakes the listener, which then ends.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn pass(shared: &Arc<Shared>, client: TcpStream, server: TcpStream) {
    let number = {
        let mut seen = shared.seen.lock().unwrap();
        seen.push(Vec::new());
        seen.len() - 1
    };
    let [client_too, server_too] = [&client, &server].map(|stream| stream.try_clone().unwrap());
    let clones = [&client, &server].map(|stream| stream.try_clone().unwrap());
    shared.open.lock().unwrap().extend(clones);
    for (from, to, kept) in [(client, server, Some(number)), (server_too, client_too, None)] {
        let shared = Arc::clone(shared);
        // Ends when either side does.
        std::thread::spawn(move || pump(&shared, from, to, kept));
    }
}

fn pump(shared: &Shared, mut from: TcpStream, mut to: TcpStream, kept: Option<usize>) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let mut bytes = buffer[..count].to_vec();
        if let Some(number) = kept {
            let kept = &mut shared.seen.lock().unwrap()[number];
            kept.extend_from_slice(&bytes[..count.min(KEPT - kept.len().min(KEPT))]);
        }
        if let Some(random) = &mut *shared.harm.lock().unwrap()
            && random.random_bool(0.2)
        {
            mutate(&mut bytes, random);
        }
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

/// Changes, drops, doubles or adds some bytes.
pub fn mutate(bytes: &mut Vec<u8>, random: &mut StdRng) {
    for _ in 0..random.random_range(1..4) {
        if bytes.is_empty() {
            bytes.push(random.random());
            continue;
        }
        let at = random.random_range(0..bytes.len());
        match random.random_range(0..7) {
            0 => bytes[at] ^= 1 << random.random_range(0..8),
            1 => bytes[at] = random.random(),
            2 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][random.random_range(0..5)],
            3 => bytes.truncate(at),
            4 => {
                bytes.remove(at);
            }
            5 => bytes.insert(at, random.random()),
            // A length or a count becomes huge.
            _ => {
                let end = bytes.len().min(at + random.random_range(1..9));
                bytes[at..end].fill(0xff);
            }
        }
    }
}

/// A pause of a length that differs from time to time.
pub fn pause(random: &mut StdRng, least: Duration, most: Duration) -> Duration {
    least + (most - least).mul_f64(random.random())
}
