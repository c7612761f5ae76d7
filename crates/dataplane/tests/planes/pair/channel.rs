//! The daemons' channel, as two data planes see it: it carries lane messages, and may lose, double, delay and reorder
//! them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use kvferry_dataplane::{DataPlane, LaneMessage};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

type Letter = (&'static str, Arc<str>, LaneMessage);

/// What goes wrong, in percent of messages.
pub(crate) struct Faults {
    pub(crate) seed: u64,
    pub(crate) lost: AtomicU64,
    pub(crate) doubled: AtomicU64,
    /// Kept back and delivered after some later one.
    pub(crate) delayed: AtomicU64,
    /// Grants name this port instead, if it is not 0: that of a proxy.
    pub(crate) port: AtomicU16,
    pub(crate) delivered: AtomicU64,
}

pub(crate) struct Channel {
    sender: Sender<Letter>,
    receiver: Receiver<Letter>,
    faults: Arc<Faults>,
    ending: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Faults {
    pub(crate) fn none() -> Faults {
        Faults::some(0, 0, 0, 0)
    }

    pub(crate) fn some(seed: u64, lost: u64, doubled: u64, delayed: u64) -> Faults {
        Faults {
            seed,
            lost: lost.into(),
            doubled: doubled.into(),
            delayed: delayed.into(),
            port: AtomicU16::new(0),
            delivered: AtomicU64::new(0),
        }
    }
}

impl Channel {
    pub(crate) fn new(faults: Arc<Faults>) -> Channel {
        let (sender, receiver) = unbounded();
        Channel {
            sender,
            receiver,
            faults,
            ending: Arc::new(AtomicBool::new(false)),
            thread: Mutex::new(None),
        }
    }

    pub(crate) fn sender(&self) -> Sender<Letter> {
        self.sender.clone()
    }

    pub(crate) fn join(&self, planes: [(&'static str, DataPlane); 2]) {
        let planes: HashMap<_, _> = planes.into_iter().collect();
        let (faults, ending, receiver) = (
            Arc::clone(&self.faults),
            Arc::clone(&self.ending),
            self.receiver.clone(),
        );
        let thread = std::thread::spawn(move || {
            let mut random = StdRng::seed_from_u64(faults.seed);
            let mut kept: Vec<Letter> = Vec::new();
            let deliver = |(from, to, mut message): Letter| {
                let port = faults.port.load(Ordering::Relaxed);
                if port != 0
                    && let LaneMessage::Grant { port: granted, .. } = &mut message
                {
                    *granted = port;
                }
                // As it would go over the wire.
                let config = bincode::config::standard().with_limit::<256>();
                let bytes = bincode::serde::encode_to_vec(&message, config).unwrap();
                let (message, _) = bincode::serde::decode_from_slice(&bytes, config).unwrap();
                faults.delivered.fetch_add(1, Ordering::Relaxed);
                planes[&*to].peer_message(from, message);
            };
            while !ending.load(Ordering::Relaxed) {
                let letter = match receiver.recv_timeout(Duration::from_millis(20)) {
                    Ok(letter) => letter,
                    Err(RecvTimeoutError::Timeout) => {
                        kept.drain(..).for_each(&deliver);
                        continue;
                    }
                    Err(RecvTimeoutError::Disconnected) => return,
                };
                let mut hit =
                    |percent: &AtomicU64| random.random_range(0..100) < percent.load(Ordering::Relaxed);
                if hit(&faults.lost) {
                    continue;
                }
                if hit(&faults.delayed) {
                    kept.push(letter);
                    continue;
                }
                if hit(&faults.doubled) {
                    deliver(letter.clone());
                }
                deliver(letter);
                if hit(&faults.delayed) {
                    kept.drain(..).rev().for_each(&deliver);
                }
            }
        });
        *self.thread.lock().unwrap() = Some(thread);
    }

    pub(crate) fn end(&self) {
        self.ending.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.lock().unwrap().take() {
            thread.join().unwrap();
        }
    }
}
