//! What the Prometheus endpoint tells. Every metric is declared once, with its description;
//! `docs/metrics.md` is made from that.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, PoisonError};

use kvferry_broker::Record;
use kvferry_control::{Path, Side, Status};
use kvferry_handshake::Code;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};

use crate::log;

type Labels = Vec<(&'static str, String)>;
type Counters = Family<Labels, Counter<u64>>;
type Gauges = Family<Labels, Gauge<u64, AtomicU64>>;
type Histograms = Family<Labels, Histogram, fn() -> Histogram>;

/// Peers that ended transfers are counted for between two scrapes; those beyond count together, as [`OTHERS`].
const MOST_PEERS: usize = 8192;
const OTHERS: &str = "others";

/// All metrics.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    descriptions: Vec<Description>,
    /// Scrapes take turns: what they copy from elsewhere is cleared first.
    scrape: Mutex<()>,
    transfers: Counters,
    bytes: Counters,
    /// Peers that bytes are counted for, and whether they were forgotten already at the last scrape.
    counted_peers: Mutex<BTreeMap<String, bool>>,
    bounced: Counters,
    resent: Counters,
    phases: Histograms,
    refusals: Counters,
    peer_sent: Counters,
    peer_received: Counters,
    peer_calls: Counters,
    peer_lanes: Gauges,
    peers: Gauges,
    ranks: Gauges,
    registered: Gauges,
    counts: Gauges,
    uptime: Gauges,
    log_lost: Counters,
}

/// A metric as the documentation has it.
#[derive(Clone, Copy, Debug)]
struct Description {
    name: &'static str,
    kind: &'static str,
    labels: &'static str,
    help: &'static str,
}

#[derive(Default)]
struct Declared {
    registry: Registry,
    descriptions: Vec<Description>,
}

impl Declared {
    fn counter(&mut self, name: &'static str, labels: &'static str, help: &'static str) -> Counters {
        // The format's counters end in _total, which the encoder adds.
        let stem = name.trim_end_matches("_total");
        self.add(name, stem, "counter", labels, help, Counters::default())
    }

    fn gauge(&mut self, name: &'static str, labels: &'static str, help: &'static str) -> Gauges {
        self.add(name, name, "gauge", labels, help, Gauges::default())
    }

    fn histogram(&mut self, name: &'static str, labels: &'static str, help: &'static str) -> Histograms {
        let family: Histograms = Family::new_with_constructor(phase_histogram);
        self.add(name, name, "histogram", labels, help, family)
    }

    fn add<M: Metric + Clone>(
        &mut self,
        name: &'static str,
        stem: &'static str,
        kind: &'static str,
        labels: &'static str,
        help: &'static str,
        metric: M,
    ) -> M {
        // The encoder ends the help with a full stop of its own.
        self.registry
            .register(stem, help.trim_end_matches('.'), metric.clone());
        self.descriptions.push(Description {
            name,
            kind,
            labels,
            help,
        });
        metric
    }
}

/// From a quarter of a millisecond to two minutes.
fn phase_histogram() -> Histogram {
    let buckets = std::iter::successors(Some(0.000_25), |bound| Some(bound * 2.0)).take(20);
    Histogram::new(buckets)
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        let mut declared = Declared::default();
        let transfers = declared.counter(
            "kvferry_transfers_total",
            "side (publish, fetch), path (local, tcp, none), cause (delivered, or a code of docs/errors.md)",
            "Publishes and fetches that ended, counted for each rank.",
        );
        let bytes = declared.counter(
            "kvferry_transfer_bytes_total",
            "side, path, peer (host:port)",
            "Bytes of ended publishes and fetches. Where one transfer has several peers, all count as the first. A peer that \
             the daemon has forgotten is left out from the second scrape on.",
        );
        let bounced = declared.counter(
            "kvferry_bounced_bytes_total",
            "side",
            "Bytes that went through a bounce buffer, because the engine's memory could not be mapped.",
        );
        let resent = declared.counter(
            "kvferry_resent_chunks_total",
            "side",
            "Chunks that were sent again after a lane was lost.",
        );
        let phases = declared.histogram(
            "kvferry_phase_seconds",
            "side, phase (meet: from the rank's call until the other side was met; move: from then until the fence)",
            "How long the phases of delivered transfers took.",
        );
        let refusals = declared.counter(
            "kvferry_refusals_total",
            "code (docs/errors.md)",
            "Connections and calls that were refused.",
        );
        let peer_sent = declared.counter(
            "kvferry_peer_sent_bytes_total",
            "peer, path",
            "Bytes that went to a peer and were acknowledged.",
        );
        let peer_calls = declared.counter(
            "kvferry_peer_send_calls_total",
            "peer, path",
            "System calls that sent bytes to a peer. Each gathers many rows, where they are short.",
        );
        let peer_received = declared.counter(
            "kvferry_peer_received_bytes_total",
            "peer, path",
            "Bytes that came from a peer and landed.",
        );
        let peer_lanes = declared.gauge("kvferry_peer_lanes", "peer", "Open TCP lanes, both directions.");
        let peers = declared.gauge(
            "kvferry_peers",
            "state (connected, connecting, idle, or the code of the last failure)",
            "Peer daemons.",
        );
        let ranks = declared.gauge("kvferry_ranks", "engine", "Attached ranks.");
        let registered = declared.gauge("kvferry_registered_bytes", "engine", "Registered memory.");
        let counts = declared.gauge(
            "kvferry_counts",
            "name",
            "What must return to where it was when nothing goes on: connections, regions, jobs, links, fds and more.",
        );
        let uptime = declared.gauge(
            "kvferry_uptime_seconds",
            "release",
            "Seconds since the daemon started.",
        );
        let log_lost = declared.counter(
            "kvferry_log_lines_dropped_total",
            "why (full: too many lines waited, since the log's reader is slow; failed: they could not be written)",
            "Lines that are missing in the log. The daemon never waits for whoever reads it.",
        );
        Metrics {
            registry: declared.registry,
            descriptions: declared.descriptions,
            scrape: Mutex::new(()),
            transfers,
            bytes,
            counted_peers: Mutex::default(),
            bounced,
            resent,
            phases,
            refusals,
            peer_sent,
            peer_received,
            peer_calls,
            peer_lanes,
            peers,
            ranks,
            registered,
            counts,
            uptime,
            log_lost,
        }
    }

    /// Something was refused.
    pub(crate) fn refused(&self, code: Code) {
        self.refusals
            .get_or_create(&vec![("code", code.name().to_owned())])
            .inc();
    }

    /// A publish or fetch ended.
    pub(crate) fn ended(&self, record: &Record) {
        let side = || ("side", record.side.name().to_owned());
        let report = &record.report;
        let path = report
            .paths
            .iter()
            .max_by_key(|(_, bytes)| *bytes)
            .map_or("none", |(path, _)| path.name());
        let cause = record
            .cause
            .as_ref()
            .map_or("delivered", |cause| cause.code.name());
        let labels = vec![side(), ("path", path.to_owned()), ("cause", cause.to_owned())];
        self.transfers.get_or_create(&labels).inc();
        let peer = self.counted(report.peers.first().map_or("", String::as_str));
        for (path, bytes) in &report.paths {
            let labels = of_peer(record.side, *path, &peer);
            self.bytes.get_or_create(&labels).inc_by(*bytes);
        }
        self.bounced.get_or_create(&vec![side()]).inc_by(report.bounced);
        self.resent.get_or_create(&vec![side()]).inc_by(report.resent);
        if record.cause.is_none() {
            for (phase, micros) in [("meet", report.met_us), ("move", report.moved_us)] {
                let labels = vec![side(), ("phase", phase.to_owned())];
                let seconds = std::time::Duration::from_micros(micros).as_secs_f64();
                self.phases.get_or_create(&labels).observe(seconds);
            }
        }
    }

    /// The name that a peer's bytes are counted under.
    fn counted(&self, peer: &str) -> String {
        let mut peers = self.counted_peers.lock().unwrap_or_else(PoisonError::into_inner);
        let peer = match peers.len() < MOST_PEERS || peers.contains_key(peer) {
            true => peer,
            false => OTHERS,
        };
        peers.insert(peer.to_owned(), false);
        peer.to_owned()
    }

    /// Takes out what was counted for peers that the daemon has forgotten, once a scrape has told it.
    fn leave_out_forgotten(&self, status: &Status) {
        let mut peers = self.counted_peers.lock().unwrap_or_else(PoisonError::into_inner);
        let known: BTreeSet<&str> = status.peers.iter().map(|peer| peer.address.as_str()).collect();
        let stays =
            |peer: &str| known.contains(peer) || peer == status.address || peer == OTHERS || peer.is_empty();
        peers.retain(|peer, told| {
            let left = !stays(peer);
            if left && *told {
                for side in [Side::Publish, Side::Fetch] {
                    for path in [Path::Local, Path::Tcp] {
                        self.bytes.remove(&of_peer(side, path, peer));
                    }
                }
                return false;
            }
            *told = left;
            true
        });
    }

    /// The text of a scrape, with what `status` says now.
    pub(crate) fn render(&self, status: &Status) -> Result<String, std::fmt::Error> {
        let _turn = self.scrape.lock().unwrap_or_else(PoisonError::into_inner);
        self.copy(status);
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }

    fn copy(&self, status: &Status) {
        self.leave_out_forgotten(status);
        self.peer_sent.clear();
        self.peer_received.clear();
        self.peer_calls.clear();
        self.log_lost.clear();
        let lost = log::lost();
        for (why, lines) in [("full", lost.no_room), ("failed", lost.not_written)] {
            let labels = vec![("why", why.to_owned())];
            self.log_lost.get_or_create(&labels).inc_by(lines);
        }
        for gauges in [
            &self.peer_lanes,
            &self.peers,
            &self.ranks,
            &self.registered,
            &self.counts,
            &self.uptime,
        ] {
            gauges.clear();
        }
        for peer in &status.peers {
            let labels = vec![
                ("peer", peer.address.clone()),
                ("path", Path::Tcp.name().to_owned()),
            ];
            self.peer_sent.get_or_create(&labels).inc_by(peer.sent_bytes);
            self.peer_received
                .get_or_create(&labels)
                .inc_by(peer.received_bytes);
            self.peer_calls.get_or_create(&labels).inc_by(peer.send_calls);
            self.peer_lanes
                .get_or_create(&vec![("peer", peer.address.clone())])
                .set(peer.lanes.into());
            self.peers
                .get_or_create(&vec![("state", peer.state.clone())])
                .inc();
        }
        for engine in &status.engines {
            let labels = vec![("engine", engine.engine.clone())];
            let ranks = u64::try_from(engine.ranks.len()).unwrap_or(u64::MAX);
            self.ranks.get_or_create(&labels).set(ranks);
            self.registered
                .get_or_create(&labels)
                .set(engine.registered_bytes);
        }
        for (name, count) in &status.counts {
            self.counts
                .get_or_create(&vec![("name", name.clone())])
                .set(*count);
        }
        self.uptime
            .get_or_create(&vec![("release", status.release.clone())])
            .set(status.uptime_s);
    }
}

fn of_peer(side: Side, path: Path, peer: &str) -> Labels {
    vec![
        ("side", side.name().to_owned()),
        ("path", path.name().to_owned()),
        ("peer", peer.to_owned()),
    ]
}

/// The reference page, `docs/metrics.md`.
pub fn reference_page() -> String {
    let mut text = String::from(
        "# Metrics of kvferryd\n\
         \n\
         `metrics_listen` of the configuration says where: `/metrics` is for Prometheus, and `/healthz` answers 200 while\n\
         the daemon works and 503 while it shuts down. The endpoint has no access control, and names engines and peers.\n\
         \n\
         This page is made from the code: `KVFERRY_WRITE_DOCS=1 cargo test -p kvferry-daemon` writes it again.\n",
    );
    for Description {
        name,
        kind,
        labels,
        help,
    } in Metrics::new().descriptions
    {
        text.push_str(&format!(
            "\n## `{name}`\n\n{help}\n\nA {kind}; labels: {labels}.\n"
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use kvferry_control::{EngineStatus, Fault, PeerStatus, Report, TransferId};

    use super::*;

    fn record(cause: Option<Fault>) -> Record {
        Record {
            transfer: TransferId::from("t"),
            engine: "e".into(),
            rank: 0,
            side: Side::Fetch,
            peer_engine: "p".into(),
            tokens: 5,
            report: Report {
                peers: vec!["node:1".into()],
                paths: vec![(Path::Local, 3), (Path::Tcp, 100)],
                met_us: 1000,
                moved_us: 2000,
                ..Report::default()
            },
            cause,
        }
    }

    fn status() -> Status {
        Status {
            peers: vec![PeerStatus {
                address: "node:1".into(),
                state: "connected".into(),
                lanes: 2,
                sent_bytes: 7,
                received_bytes: 9,
                send_calls: 2,
            }],
            engines: vec![EngineStatus {
                engine: "e".into(),
                model: String::new(),
                ranks: vec![0, 1],
                of: 2,
                registered_bytes: 11,
                publishes: 0,
                fetches: 0,
                links: Vec::new(),
            }],
            counts: vec![("regions".into(), 4)],
            release: "0".into(),
            ..Status::default()
        }
    }

    #[test]
    fn what_is_scraped_is_what_is_documented() {
        let metrics = Metrics::new();
        metrics.ended(&record(None));
        metrics.refused(Code::OverLimit);
        let scraped = metrics.render(&status()).unwrap();
        let mut typed: Vec<&str> = scraped
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
            .collect();
        let mut described: Vec<&str> = metrics
            .descriptions
            .iter()
            .map(|described| described.name.trim_end_matches("_total"))
            .collect();
        typed.sort();
        described.sort();
        assert_eq!(typed, described);
        for described in &metrics.descriptions {
            if described.kind != "histogram" {
                let sample = format!("\n{}{{", described.name);
                assert!(
                    scraped.contains(&sample),
                    "{} has no sample in\n{scraped}",
                    described.name
                );
            }
        }
    }

    #[test]
    fn ends_are_counted_by_side_path_and_cause() {
        let metrics = Metrics::new();
        metrics.ended(&record(None));
        metrics.ended(&record(None));
        metrics.ended(&record(Some(Fault::new(Code::Deadline, ""))));
        // Twice: what is copied at a scrape is not added up.
        metrics.render(&status()).unwrap();
        let scraped = metrics.render(&status()).unwrap();
        for line in [
            "kvferry_transfers_total{side=\"fetch\",path=\"tcp\",cause=\"delivered\"} 2",
            "kvferry_transfers_total{side=\"fetch\",path=\"tcp\",cause=\"deadline\"} 1",
            "kvferry_transfer_bytes_total{side=\"fetch\",path=\"tcp\",peer=\"node:1\"} 300",
            "kvferry_phase_seconds_count{side=\"fetch\",phase=\"move\"} 2",
            "kvferry_peer_sent_bytes_total{peer=\"node:1\",path=\"tcp\"} 7",
            "kvferry_peer_lanes{peer=\"node:1\"} 2",
            "kvferry_counts{name=\"regions\"} 4",
        ] {
            assert!(
                scraped.lines().any(|scraped| scraped == line),
                "{line} is not in\n{scraped}"
            );
        }
    }

    #[test]
    fn forgotten_peers_leave_once_they_were_told() {
        let metrics = Metrics::new();
        let of = |peer: &str| {
            let mut record = record(None);
            record.report.peers = vec![peer.to_owned()];
            metrics.ended(&record);
        };
        // Of the daemon itself, of a peer, and of one that is gone before anybody looked.
        ["self:1", "node:1", "gone:1"].into_iter().for_each(of);
        let mut status = status();
        status.address = "self:1".to_owned();
        let peers = |status: &Status| {
            let scraped = metrics.render(status).unwrap();
            ["self:1", "node:1", "gone:1"].map(|peer| scraped.contains(&format!("\"{peer}\"")))
        };
        assert_eq!(peers(&status), [true, true, true]);
        assert_eq!(peers(&status), [true, true, false]);
        status.peers.clear();
        assert_eq!(peers(&status), [true, true, false]);
        assert_eq!(peers(&status), [true, false, false]);
        // It comes back.
        of("node:1");
        assert_eq!(peers(&status), [true, true, false]);
        assert_eq!(metrics.counted_peers.lock().unwrap().len(), 2);
    }

    #[test]
    fn peers_that_nobody_scrapes_are_bounded() {
        let metrics = Metrics::new();
        for peer in 0..2 * MOST_PEERS {
            metrics.counted(&format!("node:{peer}"));
        }
        assert_eq!(metrics.counted_peers.lock().unwrap().len(), MOST_PEERS + 1);
        assert_eq!(metrics.counted("new:1"), OTHERS);
        assert_eq!(metrics.counted("node:1"), "node:1");
    }
}
