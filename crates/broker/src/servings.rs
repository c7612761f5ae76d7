//! What a publish does for one decode engine: all of its ranks fetch, and end together.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_control::{Event, Fault, Path};
use kvferry_handshake::Code;

use crate::Broker;
use crate::announced::{Part, PartKey, Stage};
use crate::cause::{Cause, Place, Standing};
use crate::io::{DataCommand, Micros};
use crate::peer::EngineId;
use crate::progress::stuck_at;
use crate::publishes::{Publish, PublishKey};
use crate::wanted::{check_length, check_state};

#[derive(Debug)]
pub(crate) struct Serving {
    /// Ranks of the decode engine; 0 while none has come.
    pub(crate) of: u32,
    /// Decode ranks that fetch, or did.
    pub(crate) taken: BTreeMap<u32, PartKey>,
    /// Decode ranks that have everything.
    delivered: BTreeSet<u32>,
    pub(crate) progress: Micros,
    /// When bytes of it were last known to be under way, or waiting their turn.
    pub(crate) alive: Micros,
    pub(crate) outcome: Option<Outcome>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Outcome {
    Delivered,
    Declined,
    Failed(Cause),
}

impl Serving {
    /// Of an engine that said before that it will not fetch: because it declined, or because it failed.
    pub(crate) fn forgone(why: Option<Cause>, now: Micros) -> Serving {
        Serving {
            outcome: Some(why.map_or(Outcome::Declined, Outcome::Failed)),
            ..Serving::new(0, now)
        }
    }

    fn new(of: u32, now: Micros) -> Serving {
        Serving {
            of,
            taken: BTreeMap::new(),
            delivered: BTreeSet::new(),
            progress: now,
            alive: 0,
            outcome: None,
        }
    }

    pub(crate) fn has_delivered(&self, rank: u32) -> bool {
        self.delivered.contains(&rank)
    }

    /// Whether this fetch is one that it waits for.
    pub(crate) fn takes(&self, key: &PartKey) -> bool {
        self.taken.values().any(|taken| taken == key)
    }

    /// The decode rank may come (again).
    pub(crate) fn untake(&mut self, rank: u32, key: &PartKey) {
        if self.taken.get(&rank) == Some(key) && !self.delivered.contains(&rank) {
            self.taken.remove(&rank);
        }
    }
}

/// Why a fetch is not served, though the publish goes on.
enum Unserved {
    Refused(Cause),
    /// The same rank's earlier announcement is still here: it goes first.
    Replaces(PartKey),
}

impl Publish {
    /// When the first of those it serves has stalled for too long; `None`: it serves nobody now.
    pub(crate) fn next_deadline(&self, deadline: Micros) -> Option<Micros> {
        let open = self.servings.values().filter(|serving| serving.outcome.is_none());
        open.map(|serving| self.stuck_at(serving, deadline)).min()
    }

    pub(crate) fn stalled(&self, now: Micros, deadline: Micros) -> Vec<EngineId> {
        let open = self
            .servings
            .iter()
            .filter(|(_, serving)| serving.outcome.is_none());
        open.filter(|(_, serving)| self.stuck_at(serving, deadline) <= now)
            .map(|(engine, _)| engine.clone())
            .collect()
    }

    fn stuck_at(&self, serving: &Serving, deadline: Micros) -> Micros {
        stuck_at(serving.progress.max(self.stepped), serving.alive, deadline)
    }

    /// What another life of the same engine did with it.
    fn earlier_life(&self, engine: &EngineId) -> Option<&'static str> {
        let mut others = self.servings.iter();
        let (_, other) = others.find(|(other, _)| {
            (&other.home, &other.name) == (&engine.home, &engine.name) && *other != engine
        })?;
        Some(match other.outcome {
            None => "fetches",
            Some(Outcome::Delivered) => "fetched",
            Some(Outcome::Declined) => "declined",
            Some(Outcome::Failed(_)) => "failed to fetch",
        })
    }

    /// Takes a decode rank in; true for the first of its engine.
    fn take(&mut self, key: &PartKey, part: &Part, now: Micros) -> Result<bool, Unserved> {
        let refuse = |code, what: String| Err(Unserved::Refused(Fault::new(code, what).into()));
        if let Some(what) = self.earlier_life(&part.decode) {
            let name = &part.decode.name;
            return refuse(
                Code::StaleIncarnation,
                format!(
                    "an earlier life of engine {name} {what} it; publish and fetch it with a higher attempt"
                ),
            );
        }
        let Some(serving) = self.servings.get_mut(&part.decode) else {
            let names: Vec<&str> = self.servings.keys().map(|engine| engine.name.as_str()).collect();
            if names.len() >= usize::try_from(self.serves).unwrap_or(usize::MAX) {
                return refuse(
                    Code::TransferExists,
                    format!("the publish serves {} engines: {}", self.serves, names.join(", ")),
                );
            }
            let mut serving = Serving::new(part.decode_ranks, now);
            serving.taken.insert(part.decode_rank, key.clone());
            self.servings.insert(part.decode.clone(), serving);
            return Ok(true);
        };
        match &serving.outcome {
            None => {}
            Some(Outcome::Failed(cause)) => return Err(Unserved::Refused(cause.clone())),
            Some(Outcome::Declined) => return refuse(Code::Declined, "the engine declined it".to_owned()),
            Some(Outcome::Delivered) => {
                return refuse(
                    Code::TransferExists,
                    "the engine has fetched it already".to_owned(),
                );
            }
        }
        if let Some(other) = serving.taken.get(&part.decode_rank) {
            let delivered = serving.delivered.contains(&part.decode_rank);
            let anew =
                (&other.peer, other.incarnation) == (&key.peer, key.incarnation) && other.fetch < key.fetch;
            if !delivered && anew {
                return Err(Unserved::Replaces(other.clone()));
            }
            return refuse(
                Code::TransferExists,
                format!(
                    "rank {} of engine {} fetched it before",
                    part.decode_rank, part.decode.name
                ),
            );
        }
        serving.taken.insert(part.decode_rank, key.clone());
        serving.progress = now;
        Ok(false)
    }
}

impl Broker {
    /// Brings an announced fetch and its publish together.
    pub(crate) fn bind_part(&mut self, key: &PartKey) {
        let now = self.now;
        let Some(part) = self.announced.get(key) else {
            return;
        };
        let publish_key = part.publish_key(key);
        let Some(publish) = self.publishes.get_mut(&publish_key) else {
            return;
        };
        let first = match publish.take(key, part, now) {
            Ok(first) => first,
            Err(Unserved::Refused(cause)) => return self.part_failed_here(key, &cause),
            Err(Unserved::Replaces(other)) => {
                self.withdraw_part(&other);
                return self.bind_part(key);
            }
        };
        publish.parts.insert(key.clone());
        publish.met.get_or_insert(now);
        let event = Event::Matched {
            transfer: publish_key.1.clone(),
            engine: part.decode.name.clone(),
            held: part.tokens.from,
        };
        self.announced.bind(key);
        if first && let Some(session) = self.ranks.session(publish_key.0) {
            self.event(session, event);
        }
        self.open_part(key, &publish_key);
        self.advance_part(key, false);
        self.watch_publish(&publish_key);
    }

    /// Opens the job that moves a part's bytes, if it has any.
    fn open_part(&mut self, key: &PartKey, publish_key: &PublishKey) {
        let Some(part) = self.announced.get(key) else {
            return;
        };
        let Some(map) = part.map.clone().filter(|_| part.total > 0) else {
            return;
        };
        let Some(publish) = self.publishes.get(publish_key) else {
            return;
        };
        let (pages, regions) = (publish.pages.lists.clone(), publish.regions.clone());
        let (slot, rank) = (part.slot, part.rank);
        let peer = key.peer.clone();
        let job = if self.is_own(&peer) {
            // Both sides are here, and share the job. Where the fetch has ended, its word is on its way.
            let fetch = self.fetches.copies_to(key.fetch, rank);
            let Some((target_pages, target_regions)) = fetch else {
                return;
            };
            let job = self.open_job(peer, Path::Local, Some(key.clone()), Some((key.fetch, rank)));
            self.fetches.set_job(key.fetch, rank, job);
            self.data(DataCommand::Copy {
                job,
                map,
                source_pages: pages,
                source_regions: regions,
                pages: target_pages,
                regions: target_regions,
            });
            job
        } else {
            let Some(slot) = slot else {
                return;
            };
            let job = self.open_job(peer.clone(), Path::Tcp, Some(key.clone()), None);
            self.data(DataCommand::Send {
                job,
                peer,
                slot,
                map,
                pages,
                regions,
            });
            job
        };
        if let Some(part) = self.announced.get_mut(key) {
            part.job = Some(job);
        }
    }

    /// Tells a bound fetch how far its publish is: the data plane, and the decode side.
    pub(crate) fn advance_part(&mut self, key: &PartKey, pages_changed: bool) {
        let Some(part) = self.announced.get(key) else {
            return;
        };
        let publish_key = part.publish_key(key);
        let Some(publish) = self.publishes.get(&publish_key) else {
            return;
        };
        if let Err(cause) = check_part(part, publish) {
            return self.fail_part(key, cause.into());
        }
        let ready = publish.ready;
        let pages = pages_changed.then(|| publish.pages.lists.clone());
        let begun = ready.end.is_some() || ready.front_tokens > 0;
        if let Some(job) = part.job.filter(|job| self.job_takes_orders(*job))
            && (begun || pages_changed)
        {
            self.data(DataCommand::Ready {
                job,
                ready,
                source_pages: pages,
            });
        }
        self.tell_part_state(key, 0);
    }

    /// A publish stepped forward.
    pub(crate) fn advance_publish(&mut self, key: &PublishKey, pages_changed: bool) {
        let parts = self.publishes.get(key).map(|publish| publish.parts.clone());
        for part in parts.unwrap_or_default() {
            self.advance_part(&part, pages_changed);
        }
    }

    /// A part cannot go on: its fetch fails on all ranks.
    pub(crate) fn fail_part(&mut self, key: &PartKey, cause: Cause) {
        let Some(part) = self.announced.get(key) else {
            return;
        };
        match part.stage {
            Stage::Waiting => self.part_failed_here(key, &cause),
            Stage::Bound => {
                let (publish_key, decode) = (part.publish_key(key), part.decode.clone());
                let stands = self.publish_at(&publish_key);
                self.part_failed_here(key, &cause);
                self.fail_serving(&publish_key, &decode, &cause, Some(key), stands);
            }
            Stage::Ended => {}
        }
    }

    /// One decode engine is not served (any more). `by`: the part that failed, which knows. `stands`: how the publish stood
    /// before that part ended.
    pub(crate) fn fail_serving(
        &mut self,
        key: &PublishKey,
        engine: &EngineId,
        cause: &Cause,
        by: Option<&PartKey>,
        stands: Option<(Place, Standing)>,
    ) {
        // The engines that it serves besides have a whole lease to come.
        let lease_until = self.now + self.config.lease_us;
        let Some((place, standing)) = stands else {
            return;
        };
        let cause = cause.clone().at(&place, Some(&standing));
        let Some(publish) = self.publishes.get_mut(key) else {
            return;
        };
        let failed = |serving: &Serving| matches!(serving.outcome, Some(Outcome::Failed(_)));
        let first = !publish.servings.values().any(failed);
        let Some(serving) = publish
            .servings
            .get_mut(engine)
            .filter(|serving| serving.outcome.is_none())
        else {
            return;
        };
        let one = by.is_some_and(|by| serving.takes(by));
        let told = if one { cause.for_sibling() } else { cause.clone() };
        // The publish fails with the first, and with its mismatches.
        let kept = if first { cause } else { cause.remembered() };
        if first {
            publish.stood = Some(standing);
        }
        serving.outcome = Some(Outcome::Failed(kept));
        publish.lease_until = publish.lease_until.max(lease_until);
        let others: Vec<PartKey> = serving
            .taken
            .values()
            .filter(|key| Some(*key) != by)
            .cloned()
            .collect();
        for other in others {
            self.part_failed_here(&other, &told);
        }
        self.check_served(key);
        self.watch_publish(key);
    }

    /// A decode rank has everything.
    pub(crate) fn serve_rank(&mut self, key: &PublishKey, engine: &EngineId, rank: u32) {
        let (now, lease) = (self.now, self.config.lease_us);
        let Some(publish) = self.publishes.get_mut(key) else {
            return;
        };
        let Some(serving) = publish.servings.get_mut(engine) else {
            return;
        };
        serving.progress = now;
        serving.delivered.insert(rank);
        let all = u32::try_from(serving.delivered.len()).is_ok_and(|count| count >= serving.of);
        if all && serving.outcome.is_none() {
            serving.outcome = Some(Outcome::Delivered);
            publish.lease_until = publish.lease_until.max(now + lease);
        }
        self.check_served(key);
        self.watch_publish(key);
    }

    /// The engine said ahead that it will not fetch.
    pub(crate) fn decline_publish(&mut self, key: &PublishKey, engine: &EngineId) {
        let now = self.now;
        let Some(publish) = self.publishes.get_mut(key) else {
            return;
        };
        let room = publish.servings.len() < usize::try_from(publish.serves).unwrap_or(usize::MAX);
        if room && !publish.servings.contains_key(engine) {
            publish
                .servings
                .insert(engine.clone(), Serving::forgone(None, now));
            self.check_served(key);
            self.watch_publish(key);
        }
    }

    /// Ends a publish once all the engines that it serves have ended.
    pub(crate) fn check_served(&mut self, key: &PublishKey) {
        let Some(publish) = self.publishes.get(key) else {
            return;
        };
        let outcomes: Vec<&Outcome> = publish
            .servings
            .values()
            .filter_map(|serving| serving.outcome.as_ref())
            .collect();
        if u32::try_from(outcomes.len()).is_ok_and(|ended| ended < publish.serves) {
            return;
        }
        let failed = outcomes.iter().find_map(|outcome| match outcome {
            Outcome::Failed(cause) => Some(cause.clone()),
            _ => None,
        });
        let declined = outcomes.iter().all(|outcome| **outcome == Outcome::Declined);
        let cause = failed.or_else(|| {
            declined.then(|| {
                let names: Vec<String> = publish
                    .servings
                    .keys()
                    .map(|engine| format!("{} at {}", engine.name, engine.home))
                    .collect();
                Fault::new(
                    Code::Declined,
                    format!("engine {} will not fetch it", names.join(", ")),
                )
                .into()
            })
        });
        // The decode side's daemons tell the other ranks.
        self.end_publish(key, cause, false);
    }
}

/// Whether the publish, as far as it is, has what the fetch wants.
fn check_part(part: &Part, publish: &Publish) -> Result<(), Fault> {
    if let Some(end) = publish.end() {
        check_length(end, part.least)?;
        check_state(&part.decode_envelope, &part.pages.lists, end, part.tokens.to)?;
    }
    let Some(map) = &part.map else {
        return Ok(());
    };
    map.check_ready(&publish.ready, &publish.pages.lists)
        .map_err(crate::faults::from_plan)
}
