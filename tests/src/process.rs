//! Child processes that end with the test, whatever becomes of it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// A process under test. Dropping it kills it; a failing test prints the end of its log.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    ended: Option<ExitStatus>,
    log: PathBuf,
}

/// Lines of a log that a failing test prints.
const TOLD_LINES: usize = 60;

impl Process {
    /// Starts `program`; standard error goes to the end of the file `log`. Standard input and output are pipes
    /// when `piped`, else nothing and the log.
    pub fn start(
        name: &str,
        program: &Path,
        arguments: &[String],
        log: &Path,
        piped: bool,
    ) -> io::Result<Process> {
        let file = OpenOptions::new().create(true).append(true).open(log)?;
        let mut command = dying_with_us(program);
        command
            .args(arguments)
            .stderr(file.try_clone()?)
            .env_remove("RUST_LOG");
        if piped {
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
        } else {
            command.stdin(Stdio::null()).stdout(file);
        }
        let child = spawn(command)?;
        Ok(Process {
            name: name.to_owned(),
            child,
            ended: None,
            log: log.to_owned(),
        })
    }

    /// Its number, also after its end.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    /// The child, for its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        self.exit_status().is_none()
    }

    /// How it ended, once it has.
    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().unwrap();
        }
        self.ended
    }

    /// Shuts down its connections from and to these ports, as a network that breaks would. Gives how many.
    ///
    /// # Panics
    ///
    /// When the process cannot be looked into.
    pub fn shut_down_sockets(&self, ports: &[u16]) -> usize {
        let pid = rustix::process::Pid::from_raw(self.pid()).unwrap();
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        let mut count = 0;
        for entry in std::fs::read_dir(format!("/proc/{}/fd", self.pid()))
            .unwrap()
            .flatten()
        {
            let number: i32 = entry.file_name().to_str().unwrap().parse().unwrap();
            // It may be closed meanwhile.
            let flags = rustix::process::PidfdGetfdFlags::empty();
            let Ok(socket) = rustix::process::pidfd_getfd(&pidfd, number, flags) else {
                continue;
            };
            let stream = std::net::TcpStream::from(socket);
            let ends = [stream.local_addr(), stream.peer_addr()];
            let [Ok(near), Ok(far)] = ends else { continue };
            if ports.contains(&near.port()) || ports.contains(&far.port()) {
                count += usize::from(stream.shutdown(std::net::Shutdown::Both).is_ok());
            }
        }
        count
    }

    /// Sends a signal, if it still runs.
    pub fn signal(&mut self, signal: Signal) {
        if self.is_running() {
            // It is not waited for yet, so the number is still its own.
            let pid = Pid::from_raw(self.pid()).unwrap();
            kill_process(pid, signal).unwrap();
        }
    }

    /// SIGKILL, and waits for the end.
    pub fn kill(&mut self) {
        if self.is_running() {
            self.child.kill().unwrap();
            self.ended = Some(self.child.wait().unwrap());
        }
    }

    /// Waits for the end.
    ///
    /// # Panics
    ///
    /// When it still runs after `bound`.
    pub fn wait(&mut self, bound: Duration) -> ExitStatus {
        let end = Instant::now() + bound;
        loop {
            if let Some(status) = self.exit_status() {
                return status;
            }
            assert!(
                Instant::now() < end,
                "{} does not end within {bound:?}",
                self.name
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Everything that it logged.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Open fds.
    pub fn fds(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid()))
            .unwrap()
            .count()
    }

    /// Threads.
    pub fn threads(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/task", self.pid()))
            .unwrap()
            .count()
    }

    /// Mappings of memfds.
    pub fn memfd_maps(&self) -> usize {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid())).unwrap();
        maps.lines().filter(|line| line.contains("/memfd:")).count()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let how = match self.exit_status() {
                None => "runs".to_owned(),
                Some(status) => match status.signal() {
                    Some(signal) => format!("ended by signal {signal}"),
                    None => format!("ended: {status}"),
                },
            };
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let told = &lines[lines.len().saturating_sub(TOLD_LINES)..];
            println!(
                "--- {} ({how}), the end of its log:\n{}\n---",
                self.name,
                told.join("\n")
            );
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A command that the kernel kills when the thread that spawned it ends: for a test that is killed itself.
fn dying_with_us(program: &Path) -> Command {
    static SETPRIV: OnceLock<bool> = OnceLock::new();
    let there = *SETPRIV.get_or_init(|| {
        let tried = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "true"])
            .output();
        tried.is_ok_and(|output| output.status.success())
    });
    if there {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(program);
        command
    } else {
        Command::new(program)
    }
}

type Order = (Command, mpsc::Sender<io::Result<Child>>);

/// Spawns from one thread that lives as long as the test process: the death signal follows the thread.
fn spawn(command: Command) -> io::Result<Child> {
    static SPAWNER: OnceLock<mpsc::Sender<Order>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (orders, received) = mpsc::channel::<Order>();
        std::thread::Builder::new()
            .name("spawner".to_owned())
            .spawn(move || {
                for (mut command, reply) in received {
                    let _ = reply.send(command.spawn());
                }
            })
            .unwrap();
        orders
    });
    let (reply, answer) = mpsc::channel();
    spawner.send((command, reply)).unwrap();
    answer.recv().unwrap()
}

/// Output and exit code of a program that ends by itself.
#[derive(Debug)]
pub struct Ran {
    /// Exit code.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// Runs a program to its end.
///
/// # Panics
///
/// When it does not end within `bound`.
pub fn run(program: &Path, arguments: &[&str], bound: Duration) -> Ran {
    let folder = tempfile::tempdir().unwrap();
    let (out, err) = (folder.path().join("out"), folder.path().join("err"));
    let mut command = dying_with_us(program);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(File::create(&out).unwrap())
        .stderr(File::create(&err).unwrap())
        .env_remove("RUST_LOG");
    let mut process = Process {
        name: format!("{} {}", program.display(), arguments.join(" ")),
        child: spawn(command).unwrap(),
        ended: None,
        log: err.clone(),
    };
    let status = process.wait(bound);
    let text = |path: &Path| String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
    Ran {
        code: status.code(),
        stdout: text(&out),
        stderr: text(&err),
    }
}
