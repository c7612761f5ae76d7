//! What a rank's page lists must look like.

use std::collections::BTreeMap;

use kvferry_handshake::{ABSENT, Code, Envelope, PageLists, TokenRange, Unit};

use crate::PlanError;
use crate::tokens::Share;

/// Longest page list.
pub const MAX_PAGE_ENTRIES: usize = 1 << 24;

/// Longest prompt in tokens.
pub const MAX_TOKENS: u64 = 1 << 32;

/// One rank's rules, one per page group.
#[derive(Clone, Debug)]
pub(crate) struct PageRules {
    rank: u32,
    groups: Vec<GroupRule>,
}

#[derive(Clone, Debug)]
struct GroupRule {
    name: String,
    page_size: u64,
    pool: u32,
    /// Position of the group whose pool it draws from.
    drawn_from: u16,
    /// How the group's components split tokens, each once; empty where the rank holds none of them.
    shares: Vec<Share>,
    /// The group holds slots, of which there may be any number.
    slots: bool,
}

/// Checks one rank's page lists for the first `tokens` tokens: the number of groups, ids in the pool, no page twice,
/// enough entries; on the decode side (`exact`) not too many either, whereas a publish may run ahead of what is ready.
///
/// A page holds one piece of one group's tokens at a time, so that a page named twice would pass for two things on
/// the prefill side, too. Lists of different transfers may share pages (a common prefix).
pub fn check_pages(
    envelope: &Envelope,
    rank: u32,
    pages: &PageLists,
    tokens: u64,
    exact: bool,
) -> Result<(), PlanError> {
    let rules = PageRules::new(envelope, rank).ok_or_else(|| PlanError {
        code: Code::PagesInvalid,
        message: format!(
            "page lists of rank {rank}, but the envelope has {} ranks",
            envelope.ranks.len()
        ),
    })?;
    rules.check(pages, tokens)?;
    rules.check_unique(pages)?;
    if exact {
        rules.check_length(pages, tokens)?;
    }
    Ok(())
}

/// The pages of one list that a fetch writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrittenPages {
    /// Position of the page group.
    pub group: usize,
    /// Position of the group whose pool it draws from: ids of equal pools name the same pages.
    pub pool: u16,
    /// The first entry that is written; all from it on are. Those before are held already and may be shared.
    pub first: usize,
}

/// Which entries of its page lists a rank's fetch of `tokens` writes, for each group of which it writes any.
pub fn written_pages(envelope: &Envelope, rank: u32, tokens: TokenRange) -> Vec<WrittenPages> {
    let Some(rules) = PageRules::new(envelope, rank) else {
        return Vec::new();
    };
    let written = rules.groups.iter().enumerate().filter_map(|(group, rule)| {
        let first = rule.first_written(tokens)?;
        Some(WrittenPages {
            group,
            pool: rule.drawn_from,
            first: usize::try_from(first).unwrap_or(usize::MAX),
        })
    });
    written.collect()
}

impl PageRules {
    pub(crate) fn new(envelope: &Envelope, rank: u32) -> Option<PageRules> {
        let worker = envelope.ranks.get(usize::try_from(rank).ok()?)?;
        let mut groups: Vec<GroupRule> = envelope
            .page_groups
            .iter()
            .map(|group| GroupRule {
                name: group.name.clone(),
                page_size: u64::from(group.page_size),
                pool: group.pool_pages,
                drawn_from: group.pool,
                shares: Vec::new(),
                slots: false,
            })
            .collect();
        let mut placed = vec![false; envelope.components.len()];
        for placement in &worker.placements {
            if let Some(placed) = placed.get_mut(usize::from(placement.component)) {
                *placed = true;
            }
        }
        for (component, placed) in envelope.components.iter().zip(placed) {
            let Some(group) = groups.get_mut(usize::from(component.page_group)) else {
                continue;
            };
            let share = Share::new(component.dcp, worker.dcp_rank);
            if component.unit == Unit::Slot {
                group.slots = true;
            } else if placed && !group.shares.contains(&share) {
                group.shares.push(share);
            }
        }
        Some(PageRules { rank, groups })
    }

    /// Pages of a group: ids are below it.
    pub(crate) fn pool(&self, group: u16) -> u32 {
        self.groups.get(usize::from(group)).map_or(0, |group| group.pool)
    }

    /// Name of a group.
    pub(crate) fn name(&self, group: u16) -> &str {
        self.groups
            .get(usize::from(group))
            .map_or("", |group| &group.name)
    }

    /// Entries of a group's list that the first `tokens` tokens take.
    pub(crate) fn needed(&self, group: u16, tokens: u64) -> u64 {
        let rule = self.groups.get(usize::from(group));
        rule.map_or(u64::MAX, |rule| rule.needed(tokens))
    }

    /// The rules that both sides have.
    pub(crate) fn check(&self, pages: &PageLists, tokens: u64) -> Result<(), PlanError> {
        if tokens > MAX_TOKENS {
            return Err(PlanError {
                code: Code::OverLimit,
                message: format!("{tokens} tokens; at most {MAX_TOKENS}"),
            });
        }
        if pages.groups.len() != self.groups.len() {
            return Err(PlanError {
                code: Code::PagesInvalid,
                message: format!(
                    "{} page lists for rank {}, but its envelope has {} page groups: give one list per group",
                    pages.groups.len(),
                    self.rank,
                    self.groups.len()
                ),
            });
        }
        for (group, list) in self.groups.iter().zip(&pages.groups) {
            if list.len() > MAX_PAGE_ENTRIES {
                return Err(PlanError {
                    code: Code::OverLimit,
                    message: format!(
                        "{} entries in the page list of group {:?} of rank {}; at most {MAX_PAGE_ENTRIES}",
                        list.len(),
                        group.name,
                        self.rank
                    ),
                });
            }
            let needed = group.needed(tokens);
            if (list.len() as u64) < needed {
                return Err(self.invalid(
                    group,
                    format!(
                        "{} entries, but {} take {} of {}",
                        list.len(),
                        counted(tokens, "token"),
                        counted(needed, "page"),
                        counted(group.page_size, "token"),
                    ),
                ));
            }
            if let Some((at, id)) = first_outside(list, group.pool) {
                return Err(self.invalid(
                    group,
                    format!("entry {at} is page {id}, but the pool has {} pages", group.pool),
                ));
            }
        }
        Ok(())
    }

    /// What a decode rank's lists must keep besides: no more entries than the prompt can take.
    fn check_length(&self, pages: &PageLists, tokens: u64) -> Result<(), PlanError> {
        for (group, list) in self.groups.iter().zip(&pages.groups) {
            let most = group.most(tokens);
            if let Some(most) = most.filter(|most| list.len() as u64 > *most) {
                return Err(self.invalid(
                    group,
                    format!(
                        "{} entries, but {} take at most {} of {}",
                        list.len(),
                        counted(tokens, "token"),
                        counted(most, "page"),
                        counted(group.page_size, "token"),
                    ),
                ));
            }
        }
        Ok(())
    }

    /// No page twice in a list, nor in those of groups that share a pool.
    fn check_unique(&self, pages: &PageLists) -> Result<(), PlanError> {
        // Groups that share a pool must not share a page either.
        let mut pools: BTreeMap<u16, (&GroupRule, Vec<&[u32]>)> = BTreeMap::new();
        for (group, list) in self.groups.iter().zip(&pages.groups) {
            let lists = pools
                .entry(group.drawn_from)
                .or_insert_with(|| (group, Vec::new()));
            lists.1.push(list);
        }
        for (group, lists) in pools.into_values() {
            if let Some(id) = repeated(&lists, group.pool) {
                let who = match lists.len() {
                    1 => "",
                    _ => ", by it or by a group that shares its pool",
                };
                return Err(self.invalid(
                    group,
                    format!("page {id} is named twice{who}; a page holds one thing at a time"),
                ));
            }
        }
        Ok(())
    }

    fn invalid(&self, group: &GroupRule, what: String) -> PlanError {
        PlanError {
            code: Code::PagesInvalid,
            message: format!(
                "page list of group {:?} of rank {}: {what}",
                group.name, self.rank
            ),
        }
    }
}

impl GroupRule {
    /// Entries that the first `tokens` tokens take.
    fn needed(&self, tokens: u64) -> u64 {
        let local = self.shares.iter().map(|share| share.count_below(tokens)).max();
        local.unwrap_or(0).div_ceil(self.page_size.max(1))
    }

    /// The first entry that a fetch of `tokens` writes; `None`: it writes none. Slots are written whole.
    fn first_written(&self, tokens: TokenRange) -> Option<u64> {
        if self.slots {
            return Some(0);
        }
        let first = |share: &Share| share.count_below(tokens.from) / self.page_size.max(1);
        let first = self.shares.iter().map(first).min()?;
        (tokens.from < tokens.to).then_some(first)
    }

    /// Entries that they take at most on any rank: engines with DCP give all ranks lists of one length.
    fn most(&self, tokens: u64) -> Option<u64> {
        if self.slots {
            return None;
        }
        let widest = self.shares.iter().map(|share| u64::from(share.dcp.size)).min()?;
        Some(tokens.div_ceil(self.page_size.max(1).saturating_mul(widest.max(1))))
    }
}

/// `1 page`, `2 pages`.
fn counted(count: u64, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

/// The first entry that is neither absent nor in the pool.
fn first_outside(list: &[u32], pool: u32) -> Option<(usize, u32)> {
    // Page lists are long and nearly always good: ask first in a form that vectorises.
    let bad = list
        .iter()
        .fold(false, |bad, id| bad | ((*id >= pool) & (*id != ABSENT)));
    if !bad {
        return None;
    }
    let at = list.iter().position(|id| *id >= pool && *id != ABSENT)?;
    Some((at, list[at]))
}

/// An id, other than absent, that the lists have twice.
fn repeated(lists: &[&[u32]], pool: u32) -> Option<u32> {
    let ids = || {
        lists
            .iter()
            .flat_map(|list| list.iter().copied())
            .filter(|id| *id != ABSENT)
    };
    let entries: usize = lists.iter().map(|list| list.len()).sum();
    let pool = usize::try_from(pool).unwrap_or(usize::MAX);
    // One bit a page of the pool, unless the pool is huge and the lists short.
    if pool / 64 <= entries.saturating_add(1024) {
        let mut seen = vec![0u64; pool / 64 + 1];
        return ids().find(|id| {
            let at = usize::try_from(*id).unwrap_or(usize::MAX);
            let Some(word) = seen.get_mut(at / 64) else {
                return true;
            };
            let bit = 1u64 << (at % 64);
            let before = *word & bit != 0;
            *word |= bit;
            before
        });
    }
    let mut sorted: Vec<u32> = ids().collect();
    sorted.sort_unstable();
    sorted
        .windows(2)
        .find(|pair| pair[0] == pair[1])
        .map(|pair| pair[0])
}
