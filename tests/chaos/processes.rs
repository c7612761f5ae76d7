//! A prefill and a decode engine in processes of their own, killed at random.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvferry_handshake::{Envelope, Role};
use kvferry_tests::engine::named;
use kvferry_tests::engine_process::EngineProcess;
use kvferry_tests::node::Place;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::{Value, json};

use crate::LONGEST;
use crate::load::Tally;

/// A pair of engines.
pub(crate) struct Pair {
    number: usize,
    envelope: Envelope,
    prefill: Place,
    decode: Place,
    folder: PathBuf,
}

impl Pair {
    pub(crate) fn new(
        number: usize,
        envelope: Envelope,
        prefill: Place,
        decode: Place,
        folder: &Path,
    ) -> Pair {
        Pair {
            number,
            envelope,
            prefill,
            decode,
            folder: folder.to_owned(),
        }
    }

    /// Starts both, lets them carry prompts, kills one of them in the midst; again and again until then. After it, when
    /// nobody harms anything any more, until something was delivered.
    pub(crate) async fn run(self, seed: u64, end: Instant) -> Tally {
        let mut random = StdRng::seed_from_u64(seed);
        let mut tally = Tally::default();
        let mut life = 0;
        let delivered = |tally: &Tally| tally.ends.contains_key("fetch: delivered") && tally.bytes > 0;
        while Instant::now() < end {
            self.life(life, &mut random, end, &mut tally).await;
            life += 1;
        }
        let late = Instant::now() + LONGEST;
        while !delivered(&tally) && Instant::now() < late {
            self.life(life, &mut random, late, &mut tally).await;
            life += 1;
        }
        assert!(
            delivered(&tally),
            "processes {} delivered nothing that was verified in {life} lives: {tally:#?}",
            self.number
        );
        tally
    }

    async fn life(&self, life: u32, random: &mut StdRng, end: Instant, tally: &mut Tally) {
        let name = |side: &str| format!("process{}-{side}-{life}", self.number);
        let prefill = named(&self.envelope, &name("prefill"), Role::Prefill);
        let decode = named(&self.envelope, &name("decode"), Role::Decode);
        let source = format!("kvferry://{}/{}", self.prefill.address, prefill.identity.engine);
        let mut engines = [
            EngineProcess::start(&prefill, &self.prefill, &self.folder),
            EngineProcess::start(&decode, &self.decode, &self.folder),
        ];
        tally.engines += 2;
        for prompt in 0..random.random_range(3..12) {
            if Instant::now() >= end || engines.iter_mut().any(|engine| !engine.process().is_running()) {
                break;
            }
            let transfer = format!("{source} {prompt}");
            let (tokens, steps) = (random.random_range(1..900), random.random_range(1..5));
            let publish = json!({"do": "publish", "transfer": transfer, "tokens": tokens, "steps": steps, "pause_ms": 5});
            let fetch = json!({"do": "fetch", "source": source, "transfer": transfer, "to": tokens});
            engines[0].order(&publish);
            engines[1].order(&fetch);
            tokio::time::sleep(Duration::from_millis(random.random_range(0..400))).await;
        }
        // One of them is killed, or both end by themselves.
        let killed = random.random_range(0..3);
        if killed < 2 {
            engines[killed].process().kill();
        }
        for engine in &mut engines {
            engine.no_more_orders();
        }
        for (at, engine) in engines.iter_mut().enumerate() {
            let end = Instant::now() + LONGEST;
            while engine.process().is_running() {
                let told = engine.told();
                assert!(Instant::now() < end, "an engine does not end; it told {told:?}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            let code = engine.process().exit_status().and_then(|status| status.code());
            let told = engine.all_told();
            check(&told, tally);
            if at != killed {
                ended_by_itself(&told, code);
            }
        }
    }
}

/// An engine that nobody killed comes to its end: it compares its whole pool, and says how it went. Only one that never
/// got hold of a daemon has nothing to compare.
fn ended_by_itself(told: &[Value], code: Option<i32>) {
    let tells = |kind: &str| told.iter().any(|event| event["event"] == kind);
    let codes: &[i32] = if tells("registered") {
        assert!(
            tells("audited"),
            "an engine ended with {code:?} unaudited: {told:?}"
        );
        &[0, 1, 3]
    } else {
        &[1, 3]
    };
    assert!(
        code.is_some_and(|code| codes.contains(&code)),
        "an engine ended with {code:?}: {told:?}"
    );
}

/// Whatever else happened: what was verified was right.
fn check(told: &[Value], tally: &mut Tally) {
    for event in told {
        match event["event"].as_str() {
            Some("verified" | "audited") => {
                assert_eq!(event["wrong"], 0, "{event}");
                tally.bytes += event["bytes"].as_u64().unwrap_or(0);
            }
            Some("delivered") => tally.count(event["side"].as_str().unwrap_or("?"), "delivered"),
            Some("failed") => {
                let code = event["code"].as_str().unwrap_or("?").to_owned();
                tally.count(event["side"].as_str().unwrap_or("?"), &code);
            }
            _ => {}
        }
    }
}
