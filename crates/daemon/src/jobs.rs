//! Between the broker's words and the data plane's: they do not know each other.

use std::sync::Arc;

use kvferry_broker::{DataCommand, DataEvent, JobId, PeerAddress, RegionKey, Tally};
use kvferry_control::Fault;
use kvferry_dataplane::{DataPlane, Event, LaneMessage};

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
}

/// Who is to hear of an event, and in which words.
pub(crate) fn report(event: Event) -> Report {
    let job = |job: kvferry_dataplane::JobId| JobId(job.0);
    Report::ToBroker(match event {
        Event::ToPeer { peer, message } => return Report::ToPeer(PeerAddress(peer), message),
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

fn id(job: JobId) -> kvferry_dataplane::JobId {
    kvferry_dataplane::JobId(job.0)
}

fn keys(regions: &[(u16, RegionKey)]) -> Arc<[(u16, kvferry_dataplane::RegionKey)]> {
    let keys = regions
        .iter()
        .map(|(number, key)| (*number, kvferry_dataplane::RegionKey(key.0)));
    keys.collect()
}
