//! What is here, for operators and for tests.

use kvferry_control::EngineStatus;

use crate::Broker;
use crate::links::outcome_word;
use crate::ranks::Rank;

pub(crate) fn counts(broker: &Broker) -> Vec<(String, u64)> {
    let ranks: Vec<&Rank> = broker.ranks.iter().map(|(_, rank)| rank).collect();
    let leaving = ranks.iter().filter(|rank| rank.leaving.is_some()).count();
    let regions: usize = ranks.iter().map(|rank| rank.regions.len()).sum();
    let count = |name: &str, count: usize| (name.to_owned(), count as u64);
    vec![
        count("ranks", ranks.len() - leaving),
        count("ranks_leaving", leaving),
        count("regions", regions),
        count("seats", broker.directory.seats()),
        count("links", broker.links.len()),
        count("publishes", broker.publishes.len()),
        count("fetches", broker.fetches.len()),
        count("pages_written", broker.fetches.pages_written()),
        count("announced", broker.announced.len()),
        count("jobs", broker.jobs.len()),
        ("page_entries".to_owned(), broker.pages.held()),
    ]
}

/// Memories of what ended, and timers; they shrink by time alone.
pub(crate) fn remembered(broker: &Broker) -> Vec<(String, u64)> {
    let count = |name: &str, count: usize| (name.to_owned(), count as u64);
    vec![
        count("ended_fetches", broker.fetches.remembered()),
        count("ended_publishes", broker.publishes.remembered()),
        count("ended_announced", broker.announced.remembered()),
        count("forgone", broker.forgone.len()),
        count("engine_ends", broker.engine_ends.len()),
        count("judgements", broker.judgements.len()),
        count("timers", broker.timers.len()),
    ]
}

pub(crate) fn engines(broker: &Broker) -> Vec<EngineStatus> {
    let mut engines: Vec<EngineStatus> = Vec::new();
    let mut homes = Vec::new();
    for (life, rank) in broker.ranks.iter().filter(|(_, rank)| rank.leaving.is_none()) {
        let identity = &rank.envelope.identity;
        let key = (rank.home.clone(), identity.engine.clone());
        let at = match homes.iter().position(|home| *home == key) {
            Some(at) => at,
            None => {
                homes.push(key);
                engines.push(EngineStatus {
                    engine: identity.engine.clone(),
                    model: identity.model.clone(),
                    ranks: Vec::new(),
                    of: u32::try_from(rank.envelope.ranks.len()).unwrap_or(u32::MAX),
                    registered_bytes: 0,
                    publishes: 0,
                    fetches: 0,
                    links: links(broker, rank),
                });
                engines.len() - 1
            }
        };
        let engine = &mut engines[at];
        engine.ranks.push(rank.rank);
        engine.registered_bytes += rank.regions.values().map(|region| region.len).sum::<u64>();
        engine.publishes += broker.publishes.count_of(life) as u64;
        engine.fetches += broker.fetches.count_of(life) as u64;
    }
    for engine in &mut engines {
        engine.ranks.sort_unstable();
    }
    engines
}

fn links(broker: &Broker, rank: &Rank) -> Vec<(String, String)> {
    let Some(id) = &rank.engine else {
        return Vec::new();
    };
    let mut links: Vec<(String, String)> = broker
        .links
        .of_engine(id)
        .into_iter()
        .chain(broker.judgements.of_engine(id))
        .map(|(name, outcome)| (name, outcome_word(outcome).to_owned()))
        .collect();
    links.sort();
    links.dedup();
    links
}
