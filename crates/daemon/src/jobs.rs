//! Between the broker's words and the data plane's: they do not know each other.

use std::sync::Arc;

use kvferry_broker::{DataCommand, DataEvent, JobId, PeerAddress, RegionKey, Tally};
use kvferry_control::Fault;
use kvferry_dataplane::{DataPlane, Event, LaneMessage, LaneTrouble};

/// Has the data plane do something.
pub(crate) fn command(plane: &DataPlane, command: DataCommand) {
    match command {
        DataCommand::Receive {
            job,
            peer,
            map,
            regions,
            ..
        } => plane.receive(id(job), &peer.0, map, keys(&regions)),
        DataCommand::Send {
            job,
            peer,
            slot,
            map,
            pages,
            regions,
        } => plane.send(id(job), &peer.0, slot, map, pages, keys(&regions)),
        DataCommand::Copy {
            job,
            map,
            source_pages,
            source_regions,
            regions,
            ..
        } => plane.copy(id(job), map, source_pages, keys(&source_regions), keys(&regions)),
        DataCommand::Ready {
            job,
            ready,
            source_pages,
        } => plane.ready(id(job), ready, source_pages),
        DataCommand::End { job, end } => plane.end(id(job), end),
        DataCommand::Close { job } => plane.close(id(job)),
    }
}

/// Who is to hear of an event.
#[derive(Debug)]
pub(crate) enum Report {
    ToBroker(DataEvent),
    ToPeer(PeerAddress, LaneMessage),
    Trouble(Option<PeerAddress>, LaneTrouble, String),
}

/// Who is to hear of an event, and in which words.
pub(crate) fn report(event: Event) -> Report {
    let job = |job: kvferry_dataplane::JobId| JobId(job.0);
    Report::ToBroker(match event {
        Event::ToPeer { peer, message } => return Report::ToPeer(PeerAddress(peer), message),
        Event::Trouble { peer, kind, what } => return Report::Trouble(peer.map(PeerAddress), kind, what),
        Event::Progress { job: of, bytes } => DataEvent::Progress { job: job(of), bytes },
        Event::Alive { job: of } => DataEvent::Alive { job: job(of) },
        Event::Complete { job: of } => DataEvent::Complete { job: job(of) },
        Event::Failed {
            job: of,
            code,
            message,
        } => DataEvent::Failed {
            job: job(of),
            cause: Fault::new(code, message),
        },
        Event::Closed { job: of, tally } => DataEvent::Closed {
            job: job(of),
            tally: Tally {
                bytes: tally.bytes,
                moves: tally.moves,
                bounced: tally.bounced,
                resent: tally.resent,
            },
        },
    })
}

/// What one line is written of, and more are counted.
pub(crate) fn named(kind: LaneTrouble) -> &'static str {
    match kind {
        LaneTrouble::Token => "a token at the data port was not good",
        LaneTrouble::Violation(what) => what,
        LaneTrouble::Resources => "a lane found no thread or fd; raise the limits on tasks and open files",
        LaneTrouble::Broken => "a lane broke",
    }
}

fn id(job: JobId) -> kvferry_dataplane::JobId {
    kvferry_dataplane::JobId(job.0)
}

fn keys(regions: &[(u16, RegionKey)]) -> Arc<[(u16, kvferry_dataplane::RegionKey)]> {
    let keys = regions
        .iter()
        .map(|(number, key)| (*number, kvferry_dataplane::RegionKey(key.0)));
    keys.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_with_lanes_is_told_with_its_peer_and_kind() {
        let event = Event::Trouble {
            peer: Some("n:1".into()),
            kind: LaneTrouble::Violation("a damaged header"),
            what: "a lane from it ended".to_owned(),
        };
        match report(event) {
            Report::Trouble(Some(peer), kind, what) => {
                assert_eq!((&*peer.0, what.as_str()), ("n:1", "a lane from it ended"));
                assert_eq!(named(kind), "a damaged header");
            }
            other => panic!("{other:?}"),
        }
    }
}
