//! Memory of the engine's process.

use kvferry_client::Path;
use kvferry_tests::engine::{Carry, bytes};
use kvferry_tests::memory::Kind;
use kvferry_tests::node::Options;

use crate::{Setting, envelope};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_of_the_engines_process() {
    for (prefill, decode) in [
        (Kind::Process, Kind::Memfd),
        (Kind::Memfd, Kind::Process),
        (Kind::Process, Kind::Process),
    ] {
        let setting = Setting::with(Options::default(), &envelope(2), &envelope(1), prefill, decode).await;
        for (path, engine) in [(Path::Tcp, &setting.far), (Path::Local, &setting.near)] {
            for (length, held) in [(1, 0), (777, 0), (1_000, 33)] {
                let carry = Carry {
                    transfer: &format!("{length} {held} {path:?}"),
                    tokens: length,
                    held,
                    sparse: false,
                    fetch_first: false,
                    path: Some(path),
                };
                let carried = carry.run(&setting.prefill, engine).await;
                // From a mapping to a process and back no buffer is needed; two processes, or one and a socket, need one.
                let (at_source, at_target) = match path {
                    Path::Tcp => (prefill == Kind::Process, decode == Kind::Process),
                    Path::Local => {
                        let both = prefill == Kind::Process && decode == Kind::Process;
                        (both, both)
                    }
                };
                for (delivered, buffered) in carried
                    .publishes
                    .iter()
                    .zip([at_source; 2])
                    .chain(carried.fetches.iter().zip([at_target]))
                {
                    let bounced = if buffered { bytes(delivered) } else { 0 };
                    assert_eq!(
                        delivered.report.bounced, bounced,
                        "{prefill:?} to {decode:?}, {path:?}"
                    );
                }
            }
        }
        setting.goes_on("process memory").await;
    }
}
