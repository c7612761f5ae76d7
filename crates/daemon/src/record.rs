//! What is told of transfers and peers: one log line for each end, and the status of each peer.

use kvferry_broker::{PeerAddress, Record};
use kvferry_control::PeerStatus;
use kvferry_dataplane::PeerTraffic;

/// Text from outside as it may stand in a log: on one line.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| {
            if c.is_control() {
                char::REPLACEMENT_CHARACTER
            } else {
                c
            }
        })
        .collect()
}

/// One line for a publish or fetch that ended for one rank.
pub(crate) fn log(record: &Record) {
    let report = &record.report;
    let bytes: u64 = report.paths.iter().map(|(_, bytes)| bytes).sum();
    let paths: Vec<String> = report
        .paths
        .iter()
        .map(|(path, bytes)| format!("{}:{bytes}", path.name()))
        .collect();
    let cause = record
        .cause
        .as_ref()
        .map_or("delivered", |cause| cause.code.name());
    tracing::info!(
        target: "kvferry::transfer",
        transfer = %printable(&record.transfer.id),
        attempt = record.transfer.attempt,
        side = record.side.name(),
        engine = %printable(&record.engine),
        rank = record.rank,
        peer_engine = %printable(&record.peer_engine),
        peers = %report.peers.join(","),
        paths = %paths.join(","),
        tokens = record.tokens,
        bytes,
        bounced = report.bounced,
        moves = report.moves,
        resent = report.resent,
        met_us = report.met_us,
        moved_us = report.moved_us,
        cause,
        why = record.cause.as_ref().map(|cause| printable(&cause.message)),
        "transfer ended"
    );
}

/// Channels and lanes of each peer.
pub(crate) fn peers(states: &[(PeerAddress, &'static str)], traffic: &[PeerTraffic]) -> Vec<PeerStatus> {
    let mut peers: Vec<PeerStatus> = states
        .iter()
        .map(|(address, state)| PeerStatus {
            address: address.0.to_string(),
            state: (*state).to_owned(),
            lanes: 0,
            sent_bytes: 0,
            received_bytes: 0,
            send_calls: 0,
        })
        .collect();
    for of in traffic {
        let at = peers
            .iter()
            .position(|peer| *peer.address == *of.peer)
            .unwrap_or_else(|| {
                peers.push(PeerStatus {
                    address: of.peer.to_string(),
                    state: "idle".to_owned(),
                    lanes: 0,
                    sent_bytes: 0,
                    received_bytes: 0,
                    send_calls: 0,
                });
                peers.len() - 1
            });
        peers[at].lanes = u32::try_from(of.lanes).unwrap_or(u32::MAX);
        peers[at].sent_bytes = of.sent_bytes;
        peers[at].received_bytes = of.received_bytes;
        peers[at].send_calls = of.send_calls;
    }
    peers
}
