//! Engines as processes of their own: `kvferry engine script`, which fills, publishes, fetches and verifies by itself.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::ChildStdin;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use kvferry_handshake::Envelope;
use serde_json::Value;

use crate::node::Place;
use crate::process::Process;
use crate::programs::kvferry;
use crate::wait::until;

/// One rank of an engine, in a process.
#[derive(Debug)]
pub struct EngineProcess {
    process: Process,
    orders: Option<ChildStdin>,
    told: Arc<Mutex<Vec<Value>>>,
    reader: Option<JoinHandle<()>>,
}

impl EngineProcess {
    /// Starts rank 0 of an engine of one rank. Its files lie in `folder`.
    pub fn start(envelope: &Envelope, place: &Place, folder: &Path) -> EngineProcess {
        let name = &envelope.identity.engine;
        let file = folder.join(format!("{name}.toml"));
        std::fs::write(&file, envelope.to_toml()).unwrap();
        let arguments = [
            "engine".to_owned(),
            format!("--socket={}", place.socket.display()),
            format!("--envelope={}", file.display()),
            format!("--incarnation={}", envelope.identity.incarnation),
            "--rank=0".to_owned(),
            "--json".to_owned(),
            "--overwrite-settled".to_owned(),
            "script".to_owned(),
        ];
        let log = folder.join(format!("{name}.log"));
        let mut process = Process::start(name, &kvferry(), &arguments, &log, true).unwrap();
        let orders = process.child().stdin.take();
        let output = process.child().stdout.take().unwrap();
        let told = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&told);
        // Ends with the process.
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                let Ok(line) = line else { return };
                // A process that is killed may have written half a line.
                if let Ok(event) = serde_json::from_str(&line) {
                    sink.lock().unwrap().push(event);
                }
            }
        });
        EngineProcess {
            process,
            orders,
            told,
            reader: Some(reader),
        }
    }

    /// Gives an order; false when it does not listen any more.
    pub fn order(&mut self, order: &Value) -> bool {
        let Some(orders) = &mut self.orders else {
            return false;
        };
        writeln!(orders, "{order}").and_then(|()| orders.flush()).is_ok()
    }

    /// No more orders: it ends when all its transfers have.
    pub fn no_more_orders(&mut self) {
        self.orders = None;
    }

    /// Everything that it told so far.
    pub fn told(&self) -> Vec<Value> {
        self.told.lock().unwrap().clone()
    }

    /// Everything that it ever told: waits until it has closed its output, which it has when it ended.
    pub fn all_told(&mut self) -> Vec<Value> {
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
        self.told()
    }

    /// Waits until it told something that `is` knows.
    pub async fn tells(&self, bound: Duration, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let probe = || async {
            let told = self.told();
            let found = told.iter().find(|event| is(event)).cloned();
            found.ok_or_else(|| format!("{:?}", told.last()))
        };
        until(bound, what, probe).await
    }

    /// The process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }
}

/// Whether an event is of this kind and transfer.
pub fn is(event: &Value, kind: &str, transfer: &str) -> bool {
    event["event"] == kind && event["transfer"] == transfer
}
