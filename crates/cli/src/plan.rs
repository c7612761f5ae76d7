//! `kvferry plan`: every move of one fetch, as JSON lines that any program can verify.

use std::io::{BufWriter, Write};
use std::str::FromStr;
use std::sync::Arc;

use clap::Args;
use kvferry_handshake::{ABSENT, Component, Envelope, PageLists, TokenRange, Unit};
use kvferry_plan::{ChunkMap, LinkPlan, MAX_TOKENS, Move, check_pages, judge};

use crate::check::Pair;
use crate::exit::{Exit, bad_input, tell};
use crate::page_lists::RankedLists;
use crate::text::{bytes, counted};

const PREFILL_PAGES: &str = "--prefill-pages";
const DECODE_PAGES: &str = "--decode-pages";

/// Prints every move of one decode rank's fetch as a JSON line.
///
/// A move is one contiguous byte range: where it lies in a region of a prefill rank, and where in a region of the
/// decode rank. Moves of one rank are disjoint and cover exactly the tokens asked for; docs/plan.md tells how to verify
/// them with a program of your own. A summary goes to standard error.
///
/// PAGES: one list per page group, as GROUP=LIST: `pages=3,7,9-20`. Entry k is the page that holds the rank's tokens k*P to
/// (k+1)*P-1, counted from token 0 of the prompt. `-` is an absent page, `-*4` four of them. Separate groups by `;` or
/// repeat the flag; an engine with one group may leave the name out. `@file.json` reads {"pages": [3, 7, null]}. A list
/// that only one rank uses is written RANK:GROUP=LIST; groups that it does not name are those of all ranks.
#[derive(Args, Debug)]
pub struct Plan {
    #[command(flatten)]
    pair: Pair,
    /// The decode rank that fetches
    #[arg(long, value_name = "RANK", allow_hyphen_values = true)]
    rank: u32,
    /// Tokens wanted, FROM..TO: FROM is the first, TO is one past the last; those below FROM are held already
    #[arg(long, value_name = "FROM..TO", allow_hyphen_values = true)]
    tokens: Tokens,
    /// The prefill ranks' page lists
    #[arg(long, value_name = "PAGES", required = true, allow_hyphen_values = true)]
    prefill_pages: Vec<String>,
    /// The decode rank's page lists
    #[arg(long, value_name = "PAGES", required = true, allow_hyphen_values = true)]
    decode_pages: Vec<String>,
}

/// `FROM..TO`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tokens(pub(crate) TokenRange);

impl FromStr for Tokens {
    type Err = String;

    fn from_str(text: &str) -> Result<Tokens, String> {
        let (from, to) = text.split_once("..").ok_or("write FROM..TO, such as 0..964")?;
        let number = |text: &str, name| {
            let text = text.trim();
            text.parse::<u64>()
                .map_err(|_| format!("{name} {text:?} is no number of tokens; write FROM..TO"))
        };
        let (from, to) = (number(from, "FROM")?, number(to, "TO")?);
        if from > to {
            return Err(format!("FROM {from} lies beyond TO {to}; swap them"));
        }
        Ok(Tokens(TokenRange { from, to }))
    }
}

impl Plan {
    pub(crate) fn run(&self, out: &mut impl Write) -> anyhow::Result<Exit> {
        let (prefill, decode) = self.pair.read()?;
        let ranks = decode.ranks.len();
        if usize::try_from(self.rank).map_or(true, |rank| rank >= ranks) {
            return Err(bad_input(format!(
                "--rank {}: the decode engine has {}, from 0 to {}",
                self.rank,
                counted(ranks, "rank"),
                ranks.saturating_sub(1)
            )));
        }
        let prefill_lists = RankedLists::parse(PREFILL_PAGES, &self.prefill_pages, &prefill)?;
        let decode_lists = RankedLists::parse(DECODE_PAGES, &self.decode_pages, &decode)?;

        let (verdict, link) = judge(&prefill, &decode, self.pair.policy.into());
        let link = match link {
            Some(link) if verdict.allows() => Arc::new(link),
            _ => {
                tell(&verdict);
                return Ok(Exit::Refused);
            }
        };
        let sources = self.sources(&link, &prefill, &prefill_lists, &decode, &decode_lists)?;
        let mut out = BufWriter::with_capacity(1 << 16, out);
        let (mut moves, mut moved) = (0usize, 0u64);
        for source in &sources {
            for chunk in 0..source.map.chunks() {
                for one in source.map.moves(chunk, &source.pages) {
                    write_move(&mut out, source.rank, &one)?;
                    moves += 1;
                    moved += one.len;
                }
            }
        }
        out.flush()?;
        tell(format_args!(
            "{}, {} from {}\n",
            counted(moves, "move"),
            bytes(moved),
            ranks_named(&sources)
        ));
        let absent = self.not_moved(&link, &decode, &decode_lists.of(DECODE_PAGES, self.rank)?)?;
        if absent > 0 {
            tell(format_args!(
                "{} ({absent} bytes) of the tokens asked for are not moved: {DECODE_PAGES} has no page, or no slot, for \
                 them\n",
                bytes(absent)
            ));
        }
        Ok(Exit::Done)
    }

    /// Bytes of the tokens asked for that would move if no page of the decode rank's lists were absent.
    fn not_moved(&self, link: &Arc<LinkPlan>, decode: &Envelope, lists: &PageLists) -> anyhow::Result<u64> {
        let mut whole = lists.clone();
        for (at, list) in (0u16..).zip(&mut whole.groups) {
            let of_group = |component: &&Component| component.page_group == at;
            let slots = decode
                .components
                .iter()
                .filter(of_group)
                .any(|c| c.unit == Unit::Slot);
            if slots && list.is_empty() {
                list.push(ABSENT);
            }
            // Only counted with, so that any page will do.
            list.iter_mut()
                .filter(|page| **page == ABSENT)
                .for_each(|page| *page = 0);
        }
        if whole == *lists {
            return Ok(0);
        }
        let total = |lists: PageLists| {
            let lists = Arc::new(lists);
            link.sources(self.rank).into_iter().try_fold(0u64, |sum, rank| {
                let map = ChunkMap::new(link, rank, self.rank, self.tokens.0, Arc::clone(&lists));
                let map = map.map_err(|error| bad_input(error.to_string()))?;
                Ok::<_, anyhow::Error>(sum.saturating_add(map.total_bytes()))
            })
        };
        Ok(total(whole)?.saturating_sub(total(lists.clone())?))
    }

    fn sources(
        &self,
        link: &Arc<LinkPlan>,
        prefill: &Envelope,
        prefill_lists: &RankedLists,
        decode: &Envelope,
        decode_lists: &RankedLists,
    ) -> anyhow::Result<Vec<Source>> {
        let range = self.tokens.0;
        if range.to > MAX_TOKENS {
            return Err(bad_input(format!(
                "--tokens {}..{}: a prompt has at most {MAX_TOKENS} tokens",
                range.from, range.to
            )));
        }
        let decode_pages = Arc::new(decode_lists.of(DECODE_PAGES, self.rank)?);
        check_pages(decode, self.rank, &decode_pages, range.to, true)
            .map_err(|error| bad_input(format!("{DECODE_PAGES}: {error}")))?;
        let mut sources = Vec::new();
        for rank in link.sources(self.rank) {
            let pages = prefill_lists.of(PREFILL_PAGES, rank)?;
            check_pages(prefill, rank, &pages, range.to, false)
                .map_err(|error| bad_input(format!("{PREFILL_PAGES}, rank {rank}: {error}")))?;
            let map = ChunkMap::new(link, rank, self.rank, range, Arc::clone(&decode_pages))
                .map_err(|error| bad_input(format!("--tokens {}..{}: {error}", range.from, range.to)))?;
            map.check_source(&pages)
                .map_err(|error| bad_input(format!("{PREFILL_PAGES}, rank {rank}: {error}")))?;
            sources.push(Source { rank, map, pages });
        }
        Ok(sources)
    }
}

struct Source {
    rank: u32,
    map: ChunkMap,
    pages: PageLists,
}

fn ranks_named(sources: &[Source]) -> String {
    let ranks: Vec<String> = sources.iter().map(|source| source.rank.to_string()).collect();
    match ranks.len() {
        0 => "no prefill rank".to_owned(),
        1 => format!("prefill rank {}", ranks[0]),
        _ => format!("prefill ranks {}", ranks.join(", ")),
    }
}

/// By hand: a plan may have millions of moves, and these six fields never change.
fn write_move(out: &mut impl Write, source_rank: u32, one: &Move) -> std::io::Result<()> {
    let Move {
        source_region,
        source_offset,
        region,
        offset,
        len,
    } = one;
    writeln!(
        out,
        "{{\"source_rank\":{source_rank},\"source_region\":{source_region},\"source_offset\":{source_offset},\
         \"region\":{region},\"offset\":{offset},\"length\":{len}}}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_ranges() {
        assert_eq!(
            "3..964".parse::<Tokens>().unwrap().0,
            TokenRange { from: 3, to: 964 }
        );
        assert_eq!("5..5".parse::<Tokens>().unwrap().0.count(), 0);
        for (text, said) in [
            ("5", "FROM..TO"),
            ("9..3", "swap"),
            ("-1..3", "FROM"),
            ("1..=3", "TO"),
        ] {
            let error = text.parse::<Tokens>().unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }

    #[test]
    fn a_move_is_one_json_object() {
        let mut line = Vec::new();
        let one = Move {
            source_region: 1,
            source_offset: u64::MAX,
            region: 2,
            offset: 3,
            len: 4,
        };
        write_move(&mut line, 7, &one).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&line).unwrap();
        assert_eq!(value["source_rank"], 7);
        assert_eq!(value["source_offset"], u64::MAX);
        assert_eq!(value["length"], 4);
        assert_eq!(value.as_object().unwrap().len(), 6);
    }
}
