//! Page lists as they are given on a command line or in a JSON file.
//!
//! `kv=3,7,9-20,-` names pages 3, 7, 9 to 20 and one absent page for page group `kv`; `-*4` is four absent
//! pages. Several groups are separated by `;`, or the flag is repeated. An engine with one page group may leave the
//! name out. `@file.json` reads `{"kv": [3, 7, null]}` (null: absent), or a plain list. `2:kv=...` and
//! `2:@file.json` are for rank 2 alone.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context as _;
use kvferry_handshake::{ABSENT, Envelope, PageGroup, PageLists};
use kvferry_plan::MAX_PAGE_ENTRIES;

use crate::bounded::read_text;
use crate::exit::bad_input;

/// Most bytes of a file of lists: a full one, its ids written out.
const MAX_JSON: usize = 256 << 20;

/// The page lists of one engine's ranks: those for all ranks, and those for one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankedLists {
    all: Option<PageLists>,
    ranks: BTreeMap<u32, PageLists>,
}

type Groups = BTreeMap<usize, Vec<u32>>;

impl RankedLists {
    /// Reads the values of one flag, which is named in errors.
    pub(crate) fn parse(flag: &str, values: &[String], envelope: &Envelope) -> anyhow::Result<RankedLists> {
        let mut given: BTreeMap<Option<u32>, Groups> = BTreeMap::new();
        for value in values {
            let (rank, lists) = split_rank(value);
            if let Some(rank) = rank
                && usize::try_from(rank).map_or(true, |rank| rank >= envelope.ranks.len())
            {
                let ranks = envelope.ranks.len();
                return Err(bad_input(format!(
                    "{flag}: rank {rank} is not one of the engine's {ranks} ranks"
                )));
            }
            let groups = given.entry(rank).or_default();
            let named = match lists.strip_prefix('@') {
                Some(path) => read_json(path, &envelope.page_groups)
                    .map_err(|error| bad_input(format!("{flag} @{path}: {error:#}")))?,
                None => parse_groups(lists, &envelope.page_groups)
                    .map_err(|error| bad_input(format!("{flag}: {error:#}")))?,
            };
            for (group, pages) in named {
                if groups.insert(group, pages).is_some() {
                    let name = &envelope.page_groups[group].name;
                    return Err(bad_input(format!(
                        "{flag}: page group {name} is given twice; give it once"
                    )));
                }
            }
        }
        let mut all = None;
        let mut ranks = BTreeMap::new();
        for (rank, groups) in given {
            let lists = complete(groups, &envelope.page_groups)
                .map_err(|error| bad_input(format!("{flag}: {error:#}")))?;
            match rank {
                None => all = Some(lists),
                Some(rank) => {
                    ranks.insert(rank, lists);
                }
            }
        }
        Ok(RankedLists { all, ranks })
    }

    /// The lists of one rank.
    pub(crate) fn of(&self, flag: &str, rank: u32) -> anyhow::Result<PageLists> {
        let lists = self.ranks.get(&rank).or(self.all.as_ref());
        lists.cloned().ok_or_else(|| {
            bad_input(format!(
                "{flag}: no lists for rank {rank}; add {rank}:GROUP=LIST, or lists for all ranks"
            ))
        })
    }
}

/// `2:kv=1,2` is for rank 2; a path after `@` may contain colons of its own.
fn split_rank(value: &str) -> (Option<u32>, &str) {
    match value.split_once(':') {
        Some((rank, lists)) if !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit()) => {
            match rank.parse() {
                Ok(rank) => (Some(rank), lists),
                Err(_) => (None, value),
            }
        }
        _ => (None, value),
    }
}

fn group_names(groups: &[PageGroup]) -> String {
    let names: Vec<&str> = groups.iter().map(|group| group.name.as_str()).collect();
    names.join(", ")
}

fn group_named(name: &str, groups: &[PageGroup]) -> anyhow::Result<usize> {
    let found = groups.iter().position(|group| group.name == name);
    found.with_context(|| {
        format!(
            "no page group is named {name:?}; this engine has {}",
            group_names(groups)
        )
    })
}

fn only_group(groups: &[PageGroup]) -> anyhow::Result<usize> {
    anyhow::ensure!(
        groups.len() == 1,
        "the engine has several page groups ({}): write GROUP=LIST for each",
        group_names(groups)
    );
    Ok(0)
}

fn complete(mut given: Groups, groups: &[PageGroup]) -> anyhow::Result<PageLists> {
    let mut lists = Vec::with_capacity(groups.len());
    for (at, group) in groups.iter().enumerate() {
        let list = given.remove(&at);
        lists.push(list.with_context(|| {
            format!(
                "no list for page group {0}; add {0}=LIST ({0}= for an empty one)",
                group.name
            )
        })?);
    }
    Ok(PageLists { groups: lists })
}

fn parse_groups(text: &str, groups: &[PageGroup]) -> anyhow::Result<Groups> {
    let mut lists = Groups::new();
    for one in text.split(';') {
        let (group, entries) = match one.split_once('=') {
            Some((name, entries)) => (group_named(name.trim(), groups)?, entries),
            None => (only_group(groups)?, one),
        };
        let pages = parse_entries(entries).with_context(|| format!("page group {}", groups[group].name))?;
        anyhow::ensure!(
            lists.insert(group, pages).is_none(),
            "page group {} is given twice; give it once",
            groups[group].name
        );
    }
    Ok(lists)
}

/// `3,7,9-20,-,-*4`.
pub(crate) fn parse_entries(text: &str) -> anyhow::Result<Vec<u32>> {
    let mut pages = Vec::new();
    if text.trim().is_empty() {
        return Ok(pages);
    }
    for (at, entry) in text.split(',').enumerate() {
        let entry = entry.trim();
        parse_entry(entry, &mut pages).with_context(|| {
            format!(
                "entry {at}, {entry:?}: write a page id below {ABSENT}, a range such as 9-20, - for an absent page, or -*4 for four"
            )
        })?;
    }
    Ok(pages)
}

fn parse_entry(entry: &str, pages: &mut Vec<u32>) -> anyhow::Result<()> {
    let room = MAX_PAGE_ENTRIES - pages.len();
    let limit = || format!("a list has more than {MAX_PAGE_ENTRIES} entries");
    if let Some(absent) = entry.strip_prefix('-') {
        let count = match absent.strip_prefix('*') {
            Some(count) => count.parse().context("no count after -*")?,
            None if absent.is_empty() => 1usize,
            None => anyhow::bail!("neither a page id nor absent"),
        };
        anyhow::ensure!(count <= room, limit());
        pages.extend(std::iter::repeat_n(ABSENT, count));
        return Ok(());
    }
    let (first, last) = match entry.split_once('-') {
        Some((first, last)) => (page_id(first)?, page_id(last)?),
        None => (page_id(entry)?, page_id(entry)?),
    };
    anyhow::ensure!(first <= last, "the range runs backwards");
    anyhow::ensure!(usize::try_from(last - first)? < room, limit());
    pages.extend(first..=last);
    Ok(())
}

fn page_id(text: &str) -> anyhow::Result<u32> {
    let id: u32 = text.trim().parse().context("not a page id")?;
    anyhow::ensure!(id != ABSENT, "{ABSENT} stands for absent; write -");
    Ok(id)
}

type JsonList = Vec<Option<u32>>;

fn read_json(path: &str, groups: &[PageGroup]) -> anyhow::Result<Groups> {
    let text = read_text(Path::new(path), MAX_JSON).context("cannot be read")?;
    let expected = "expected {\"GROUP\": [3, 7, null], ...} or [3, 7, null]; null stands for an absent page";
    let list = |at: usize, list: JsonList| {
        anyhow::ensure!(
            list.len() <= MAX_PAGE_ENTRIES,
            "page group {}: {} entries; a list has {MAX_PAGE_ENTRIES} at most",
            groups[at].name,
            list.len()
        );
        let pages = list.into_iter().map(|page| page.unwrap_or(ABSENT)).collect();
        Ok((at, pages))
    };
    if text.trim_start().starts_with('[') {
        let plain: JsonList = serde_json::from_str(&text).context(expected)?;
        return Ok(Groups::from([list(only_group(groups)?, plain)?]));
    }
    let lists: BTreeMap<String, JsonList> = serde_json::from_str(&text).context(expected)?;
    lists
        .into_iter()
        .map(|(name, named)| list(group_named(&name, groups)?, named))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn groups(names: &[&str]) -> Vec<PageGroup> {
        let group = |name: &&str| PageGroup {
            name: (*name).to_owned(),
            page_size: 16,
            pool_pages: 100,
            pool: 0,
        };
        names.iter().map(group).collect()
    }

    #[test]
    fn entries_ranges_and_absent_pages() {
        assert_eq!(
            parse_entries("3, 7,9-11,-,5").unwrap(),
            [3, 7, 9, 10, 11, ABSENT, 5]
        );
        assert_eq!(parse_entries("-*3,1").unwrap(), [ABSENT, ABSENT, ABSENT, 1]);
        assert_eq!(parse_entries("").unwrap(), Vec::<u32>::new());
        assert_eq!(parse_entries("4294967294").unwrap(), [u32::MAX - 1]);
    }

    #[test]
    fn errors_name_the_entry_and_what_to_write() {
        for (text, at) in [
            ("1,x", "entry 1"),
            ("9-3", "entry 0"),
            ("1,,2", "entry 1"),
            ("-4", "entry 0"),
        ] {
            let error = format!("{:#}", parse_entries(text).unwrap_err());
            assert!(
                error.contains(at) && error.contains("range such as"),
                "{text}: {error}"
            );
        }
        for text in ["4294967295", "4294967296", "0-4294967294", "-*99999999999"] {
            assert!(parse_entries(text).is_err(), "{text}");
        }
    }

    #[test]
    fn groups_by_name_or_the_only_one() {
        let two = groups(&["kv", "window"]);
        let lists = parse_groups("window=-,4;kv=1-2", &two).unwrap();
        assert_eq!(
            complete(lists, &two).unwrap().groups,
            vec![vec![1, 2], vec![ABSENT, 4]]
        );
        assert_eq!(parse_groups("1,2", &groups(&["kv"])).unwrap()[&0], [1, 2]);

        let error = format!("{:#}", parse_groups("1,2", &two).unwrap_err());
        assert!(error.contains("kv, window"), "{error}");
        let error = format!("{:#}", parse_groups("wind=1", &two).unwrap_err());
        assert!(error.contains("wind") && error.contains("kv, window"), "{error}");
        assert!(parse_groups("kv=1;kv=2", &two).is_err());
        let error = format!(
            "{:#}",
            complete(parse_groups("kv=1", &two).unwrap(), &two).unwrap_err()
        );
        assert!(error.contains("window="), "{error}");
    }

    #[test]
    fn a_rank_prefix_is_told_from_a_path() {
        assert_eq!(split_rank("2:kv=1"), (Some(2), "kv=1"));
        assert_eq!(split_rank("kv=1"), (None, "kv=1"));
        assert_eq!(split_rank("@a:b.json"), (None, "@a:b.json"));
        assert_eq!(split_rank("0:@a:b.json"), (Some(0), "@a:b.json"));
    }

    #[test]
    fn json_files_name_groups_and_absent_pages() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pages.json");
        let read = |text: &str, names: &[&str]| {
            fs::write(&path, text).unwrap();
            read_json(path.to_str().unwrap(), &groups(names))
        };
        assert_eq!(read(r#"{"kv": [3, null]}"#, &["kv"]).unwrap()[&0], [3, ABSENT]);
        assert_eq!(read("[1]", &["kv"]).unwrap()[&0], [1]);
        assert!(read("[1]", &["kv", "window"]).is_err());
        assert!(read(r#"{"kv": [-1]}"#, &["kv"]).is_err());
        assert!(read(r#"{"kv": [1], "x": []}"#, &["kv"]).is_err());
        assert!(read_json("/nonexistent/pages.json", &groups(&["kv"])).is_err());
        let long = format!("[{}0]", "0,".repeat(MAX_PAGE_ENTRIES));
        let error = read(&long, &["kv"]).unwrap_err().to_string();
        assert!(error.contains("16777217 entries"), "{error}");
    }
}
