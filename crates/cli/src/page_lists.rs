//! Page lists as they are given on a command line or in a JSON file.
//!
//! `kv=3,7,9-20,-` names pages 3, 7, 9 to 20 and one absent page for page group `kv`; `-*4` is four absent
//! pages. Several groups are separated by `;`, or the flag is repeated. An engine with one page group may leave the
//! name out. `@file.json` reads `{"kv": [3, 7, null]}` (null: absent), or a plain list. `2:kv=...` and
//! `2:@file.json` are for rank 2 alone; of the groups that it does not name, it has the lists of all ranks.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use anyhow::Context as _;
use kvferry_handshake::{ABSENT, Envelope, PageGroup, PageLists};
use kvferry_plan::MAX_PAGE_ENTRIES;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use crate::bounded::read_text;
use crate::exit::bad_input;
use crate::text::counted;

/// Most bytes of a file of lists: a full one, its ids written out.
const MAX_JSON: usize = 256 << 20;

/// The page lists of one engine's ranks: those for all ranks, and those for one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankedLists {
    /// Names of the page groups.
    names: Vec<String>,
    all: Groups,
    ranks: BTreeMap<u32, Groups>,
}

type Groups = BTreeMap<usize, Vec<u32>>;

impl RankedLists {
    /// Reads the values of one flag, which is named in errors.
    pub(crate) fn parse(flag: &str, values: &[String], envelope: &Envelope) -> anyhow::Result<RankedLists> {
        let groups = &envelope.page_groups;
        let mut lists = RankedLists {
            names: groups.iter().map(|group| group.name.clone()).collect(),
            all: Groups::new(),
            ranks: BTreeMap::new(),
        };
        for value in values {
            // `0:a=1;b=2;1:a=3`: a rank's number holds until the next one.
            let mut rank = None;
            let file = split_rank(value).1.starts_with('@');
            for one in value.split(|c: char| c == ';' && !file) {
                let (prefix, text) = split_rank(one.trim());
                rank = prefix.or(rank);
                if let Some(rank) = rank
                    && usize::try_from(rank).map_or(true, |rank| rank >= envelope.ranks.len())
                {
                    let ranks = counted(envelope.ranks.len(), "rank");
                    return Err(bad_input(format!(
                        "{flag}: there is no rank {rank}; the engine has {ranks}, from 0"
                    )));
                }
                let named = match text.strip_prefix('@') {
                    Some(path) => read_json(path, groups)
                        .map_err(|error| bad_input(format!("{flag} @{path}: {error:#}")))?,
                    None => {
                        parse_group(text, groups).map_err(|error| bad_input(format!("{flag}: {error:#}")))?
                    }
                };
                lists.add(flag, rank, named)?;
            }
        }
        Ok(lists)
    }

    fn add(&mut self, flag: &str, rank: Option<u32>, named: Groups) -> anyhow::Result<()> {
        let given = match rank {
            None => &mut self.all,
            Some(rank) => self.ranks.entry(rank).or_default(),
        };
        for (group, pages) in named {
            if given.insert(group, pages).is_some() {
                let name = &self.names[group];
                let rank = rank.map_or(String::new(), |rank| format!(" for rank {rank}"));
                return Err(bad_input(format!(
                    "{flag}: page group {name} is given twice{rank}; give it once"
                )));
            }
        }
        Ok(())
    }

    /// The lists of one rank: its own, and those for all ranks of the groups that it has none of.
    pub(crate) fn of(&self, flag: &str, rank: u32) -> anyhow::Result<PageLists> {
        let own = self.ranks.get(&rank);
        let list = |(at, name): (usize, &String)| {
            let list = own.and_then(|own| own.get(&at)).or_else(|| self.all.get(&at));
            list.cloned().ok_or_else(|| {
                bad_input(format!(
                    "{flag}: rank {rank} has no list for page group {name}; add {name}=LIST ({name}= for an empty one), \
                     or {rank}:{name}=LIST for this rank alone"
                ))
            })
        };
        let groups = self.names.iter().enumerate().map(list);
        Ok(PageLists {
            groups: groups.collect::<anyhow::Result<_>>()?,
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

/// `GROUP=LIST`, or a list alone.
fn parse_group(text: &str, groups: &[PageGroup]) -> anyhow::Result<Groups> {
    let (group, entries) = match text.split_once('=') {
        Some((name, entries)) => (group_named(name.trim(), groups)?, entries),
        None => (only_group(groups)?, text),
    };
    let pages = parse_entries(entries).with_context(|| format!("page group {}", groups[group].name))?;
    Ok(Groups::from([(group, pages)]))
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
    let Named(lists) = serde_json::from_str(&text).context(expected)?;
    lists
        .into_iter()
        .map(|(name, named)| list(group_named(&name, groups)?, named))
        .collect()
}

/// `{"GROUP": LIST, ...}`, each group once: a map would keep the last of two and say nothing.
struct Named(BTreeMap<String, JsonList>);

impl<'de> Deserialize<'de> for Named {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Named, D::Error> {
        struct Groups;

        impl<'de> Visitor<'de> for Groups {
            type Value = Named;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("page lists by group")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Named, A::Error> {
                let mut lists = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    let list = map.next_value()?;
                    if lists.contains_key(&name) {
                        return Err(A::Error::custom(format!("page group {name} is given twice")));
                    }
                    lists.insert(name, list);
                }
                Ok(Named(lists))
            }
        }

        deserializer.deserialize_map(Groups)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use kvferry_handshake::{Launch, ModelShape};

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
        assert_eq!(parse_group("window=-,4", &two).unwrap()[&1], [ABSENT, 4]);
        assert_eq!(parse_group("-,2", &groups(&["kv"])).unwrap()[&0], [ABSENT, 2]);

        let error = format!("{:#}", parse_group("1,2", &two).unwrap_err());
        assert!(error.contains("kv, window"), "{error}");
        let error = format!("{:#}", parse_group("wind=1", &two).unwrap_err());
        assert!(error.contains("wind") && error.contains("kv, window"), "{error}");
    }

    fn engine(ranks: u32, names: &[&str]) -> Envelope {
        let launch = Launch {
            tp: ranks,
            ..Launch::default()
        };
        let mut envelope = launch.envelope(&ModelShape::new("m", 1).kv(0..1, 4, 64)).unwrap();
        envelope.page_groups = groups(names);
        envelope
    }

    fn lists(values: &[&str]) -> anyhow::Result<RankedLists> {
        let values: Vec<String> = values.iter().map(|value| (*value).to_owned()).collect();
        RankedLists::parse("--pages", &values, &engine(2, &["kv", "window"]))
    }

    #[test]
    fn a_rank_has_its_own_lists_and_otherwise_those_of_all() {
        let of = |values: &[&str], rank| lists(values).unwrap().of("--pages", rank).unwrap().groups;
        let two = "0:kv=1;window=2;1:kv=3;window=4";
        assert_eq!(of(&[two], 0), [[1], [2]]);
        assert_eq!(of(&[two], 1), [[3], [4]]);
        let some = ["kv=1;window=2", "1:window=5"];
        assert_eq!(of(&some, 0), [[1], [2]]);
        assert_eq!(of(&some, 1), [[1], [5]]);
    }

    #[test]
    fn what_is_missing_or_doubled_names_group_and_rank() {
        let missing = lists(&["kv=1", "1:window=5"])
            .unwrap()
            .of("--pages", 0)
            .unwrap_err();
        assert!(
            missing.to_string().contains("rank 0") && missing.to_string().contains("window="),
            "{missing}"
        );
        for values in [&["kv=1;kv=2"][..], &["kv=1", "kv=2"], &["1:kv=1;1:kv=2"]] {
            let error = lists(values).unwrap_err().to_string();
            assert!(error.contains("kv is given twice"), "{error}");
        }
        let error = lists(&["kv=1;2:kv=1"]).unwrap_err().to_string();
        assert!(
            error.contains("no rank 2") && error.contains("2 ranks"),
            "{error}"
        );
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
        let error = format!("{:#}", read(r#"{"kv": [1], "kv": [2]}"#, &["kv"]).unwrap_err());
        assert!(error.contains("kv is given twice"), "{error}");
        assert!(read_json("/nonexistent/pages.json", &groups(&["kv"])).is_err());
        let long = format!("[{}0]", "0,".repeat(MAX_PAGE_ENTRIES));
        let error = read(&long, &["kv"]).unwrap_err().to_string();
        assert!(error.contains("16777217 entries"), "{error}");
    }
}
