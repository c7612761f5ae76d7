//! From a file's keys to an envelope: names become positions, the short form becomes ranks.

use std::ops::Range;

use toml::Spanned;

use super::document::{
    ArrangementEntry, ComponentEntry, Document, GroupEntry, Names, PlacementEntry, RankEntry,
};
use super::{FileError, FileProblem, MAX_ENVELOPE_FILE};
use crate::catalogue::Code;
use crate::element::Element;
use crate::envelope::{
    Component, Dcp, Envelope, HeadSpan, Identity, Kind, PageGroup, Part, Placement, Rank, Scales, Strides,
    Unit,
};
use crate::launch::Arrangement;
use crate::limits::{MAX_COMPONENTS, MAX_HEADS, MAX_PAGE_GROUPS, MAX_RANKS};
use crate::validate::EnvelopeFault;

/// Problems listed of one file; the rest is counted.
const MAX_PROBLEMS: usize = 50;

pub(super) fn resolve(text: &str) -> Result<Envelope, FileError> {
    let mut problems = Problems::new(text);
    if text.len() > MAX_ENVELOPE_FILE {
        problems.add(
            None,
            "",
            format!("{} bytes; {MAX_ENVELOPE_FILE} are allowed", text.len()),
        );
        return Err(problems.into_error());
    }
    let document: Document = match toml::from_str(text) {
        Ok(document) => document,
        Err(error) => {
            problems.add(error.span().as_ref(), "", error.message().to_owned());
            return Err(problems.into_error());
        }
    };
    for (key, len, most) in [
        ("page_group", document.page_group.len(), MAX_PAGE_GROUPS),
        ("component", document.component.len(), MAX_COMPONENTS),
        ("rank", document.rank.len(), MAX_RANKS),
    ] {
        if len > most {
            problems.add(None, key, format!("{len} entries; {most} are allowed"));
        }
    }
    if !problems.found.is_empty() {
        return Err(problems.into_error());
    }

    let page_groups = page_groups(&document.page_group, &mut problems);
    let components = components(&document, &mut problems);
    let ranks = ranks(&document, &page_groups, &components, &mut problems);
    if !problems.found.is_empty() {
        return Err(problems.into_error());
    }
    let spots = Spots::of(&document);
    let envelope = Envelope {
        identity: identity(document),
        page_groups,
        components,
        ranks,
    };
    if let Err(invalid) = envelope.validate() {
        for fault in &invalid.faults {
            problems.add_fault(spots.of_fault(&envelope, &fault.field), fault);
        }
        problems.more += invalid.more;
        return Err(problems.into_error());
    }
    Ok(envelope)
}

fn identity(document: Document) -> Identity {
    Identity {
        engine: document.engine,
        role: document.role,
        incarnation: document.incarnation,
        model: document.model,
        revision: document.revision,
        weights_digest: document.weights_digest,
        config_digest: document.config_digest,
        framework: document.framework,
        framework_version: document.framework_version,
        prefill_context_parallel: document.prefill_context_parallel,
    }
}

fn page_groups(entries: &[Spanned<GroupEntry>], problems: &mut Problems<'_>) -> Vec<PageGroup> {
    let names: Vec<&str> = entries
        .iter()
        .map(|entry| entry.get_ref().name.as_str())
        .collect();
    let mut groups = Vec::new();
    for (at, entry) in entries.iter().enumerate() {
        let entry = entry.get_ref();
        let pool = match &entry.pool {
            None => at,
            Some(pool) => problems.position(pool, &names, || format!("page_group.{}.pool", entry.name)),
        };
        groups.push(PageGroup {
            name: entry.name.clone(),
            page_size: entry.page_size,
            pool_pages: entry.pool_pages,
            pool: short(pool),
        });
    }
    groups
}

fn components(document: &Document, problems: &mut Problems<'_>) -> Vec<Component> {
    let groups: Vec<&str> = document
        .page_group
        .iter()
        .map(|entry| entry.get_ref().name.as_str())
        .collect();
    let mut components = Vec::new();
    for spanned in &document.component {
        let entry = spanned.get_ref();
        let key = |key: &str| format!("component.{}.{key}", entry.name);
        let page_group = problems.position(&entry.page_group, &groups, || key("page_group"));
        if entry.scales.is_none() && !plain(entry.element) {
            problems.add(
                Some(&spanned.span()),
                &key("scales"),
                format!(
                    "is missing; elements of {} are scaled: write \"none\", \"model\", \"inline\" or {{ component = \
                     \"NAME\" }}",
                    entry.element
                ),
            );
        }
        components.push(component(entry, short(page_group)));
    }
    components
}

/// Whether elements of this type are stored without scales, as a rule.
fn plain(element: Element) -> bool {
    matches!(
        element,
        Element::Auto | Element::Fp32 | Element::Fp16 | Element::Bf16 | Element::Uint8
    )
}

fn component(entry: &ComponentEntry, page_group: u16) -> Component {
    let part = |part: &super::document::PartEntry| Part {
        name: part.name.clone(),
        heads: part.heads,
        width: part.width,
    };
    Component {
        name: entry.name.clone(),
        kind: entry.kind,
        page_group,
        layers: entry.layers.0.clone(),
        parts: entry.parts.iter().map(part).collect(),
        element: entry.element,
        scales: entry
            .scales
            .as_ref()
            .map_or(Scales::None, |scales| scales.scales()),
        unit: entry.unit.unwrap_or(match (entry.kind, &entry.opaque) {
            (Kind::State, _) => Unit::Slot,
            (_, Some(_)) => Unit::Page,
            (_, None) => Unit::Token,
        }),
        opaque: entry.opaque.clone(),
        window: entry.window,
        dcp: entry.dcp.as_ref().map_or(Dcp::NONE, |dcp| dcp.dcp()),
    }
}

fn ranks(
    document: &Document,
    groups: &[PageGroup],
    components: &[Component],
    problems: &mut Problems<'_>,
) -> Vec<Rank> {
    match (&document.arrangement, document.rank.as_slice()) {
        (None, []) => {
            problems.add(
                None,
                "rank",
                "is missing; write [[rank]] entries, or [arrangement]".to_owned(),
            );
            Vec::new()
        }
        (Some(arrangement), []) => arranged(arrangement, groups, components, problems),
        (Some(arrangement), _) => {
            problems.add(
                Some(&arrangement.span()),
                "arrangement",
                "makes all ranks; leave out either it or the [[rank]] entries".to_owned(),
            );
            Vec::new()
        }
        (None, ranks) => ranks
            .iter()
            .enumerate()
            .map(|(at, entry)| rank(at, entry.get_ref(), components, problems))
            .collect(),
    }
}

fn arranged(
    entry: &Spanned<ArrangementEntry>,
    groups: &[PageGroup],
    components: &[Component],
    problems: &mut Problems<'_>,
) -> Vec<Rank> {
    let keys = entry.get_ref();
    let layers = components
        .iter()
        .flat_map(|component| &component.layers)
        .max()
        .map_or(1, |l| l.saturating_add(1));
    let arrangement = Arrangement {
        tp: keys.tp,
        cp: keys.cp,
        stages: keys.stages.clone().unwrap_or_else(|| vec![layers]),
        order: keys.order.into(),
        allocation: keys.allocation.into(),
        padding: keys.padding.into(),
    };
    // Names that were not found have been told; ranks made from their stand-ins would only add noise.
    if !problems.found.is_empty() {
        return Vec::new();
    }
    arrangement.ranks(groups, components).unwrap_or_else(|error| {
        problems.add(Some(&entry.span()), "arrangement", error.to_string());
        Vec::new()
    })
}

fn rank(at: usize, entry: &RankEntry, components: &[Component], problems: &mut Problems<'_>) -> Rank {
    let placements = entry
        .placement
        .iter()
        .enumerate()
        .map(|(index, placement)| {
            let key = |key: &str| format!("rank.{at}.placement.{index}.{key}");
            self::placement(placement.get_ref(), components, problems, key)
        })
        .collect();
    Rank {
        rank: entry.rank,
        dcp_rank: entry.dcp_rank,
        placements,
    }
}

fn placement(
    entry: &PlacementEntry,
    components: &[Component],
    problems: &mut Problems<'_>,
    key: impl Fn(&str) -> String,
) -> Placement {
    let names: Vec<&str> = components
        .iter()
        .map(|component| component.name.as_str())
        .collect();
    let before = problems.found.len();
    let component = problems.position(&entry.component, &names, || key("component"));
    let mut parts = Vec::new();
    if problems.found.len() == before {
        let known: Vec<&str> = components[component]
            .parts
            .iter()
            .map(|part| part.name.as_str())
            .collect();
        let wanted: &[String] = match entry.parts.get_ref() {
            Names::One(name) => std::slice::from_ref(name),
            Names::Many(names) => names,
        };
        for name in wanted {
            let name = Spanned::new(entry.parts.span(), name.clone());
            parts.push(short(problems.position(&name, &known, || key("parts"))));
        }
    }
    let heads = head_span(entry.heads.get_ref()).unwrap_or_else(|| {
        let message = format!(
            "{:?} are no heads; write \"0-3\", or \"5\" for one",
            entry.heads.get_ref()
        );
        problems.add(Some(&entry.heads.span()), &key("heads"), message);
        HeadSpan { first: 0, count: 1 }
    });
    Placement {
        component: short(component),
        layers: entry.layers.0.clone(),
        parts,
        heads,
        region: entry.region,
        offset: entry.offset,
        strides: Strides {
            page: entry.strides.page,
            token: entry.strides.token,
            head: entry.strides.head,
            part: entry.strides.part,
            layer: entry.strides.layer,
        },
    }
}

fn head_span(text: &str) -> Option<HeadSpan> {
    let number = |text: &str| {
        let text = text.trim();
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        digits
            .then(|| text.parse::<u32>().ok())
            .flatten()
            .filter(|head| *head < MAX_HEADS)
    };
    let (first, last) = match text.split_once('-') {
        Some((first, last)) => (number(first)?, number(last)?),
        None => (number(text)?, number(text)?),
    };
    Some(HeadSpan {
        first,
        count: last.checked_sub(first)? + 1,
    })
}

/// Positions fit: the lists that they point into are bounded.
fn short(position: usize) -> u16 {
    u16::try_from(position).unwrap_or(u16::MAX)
}

/// Problems as they are found, with the lines they are on.
struct Problems<'a> {
    text: &'a str,
    found: Vec<FileProblem>,
    more: usize,
}

impl Problems<'_> {
    fn new(text: &str) -> Problems<'_> {
        Problems {
            text,
            found: Vec::new(),
            more: 0,
        }
    }

    fn line(&self, at: usize) -> usize {
        let before = self.text.as_bytes().get(..at).unwrap_or_default();
        before.iter().filter(|byte| **byte == b'\n').count() + 1
    }

    fn add(&mut self, span: Option<&Range<usize>>, key: &str, message: String) {
        self.push(Code::FileInvalid, span.map(|span| span.start), key, message);
    }

    fn add_fault(&mut self, at: Option<usize>, fault: &EnvelopeFault) {
        self.push(fault.code, at, &fault.field, fault.message.clone());
    }

    fn push(&mut self, code: Code, at: Option<usize>, key: &str, message: String) {
        if self.found.len() >= MAX_PROBLEMS {
            self.more += 1;
            return;
        }
        self.found.push(FileProblem {
            code,
            line: at.map(|at| self.line(at)),
            key: key.to_owned(),
            message,
        });
    }

    /// The position of a name among those there are; 0 where there is none, which is told.
    fn position(&mut self, name: &Spanned<String>, names: &[&str], key: impl FnOnce() -> String) -> usize {
        names
            .iter()
            .position(|known| known == name.get_ref())
            .unwrap_or_else(|| {
                let message = format!(
                    "{:?} is not there; there are: {}",
                    name.get_ref(),
                    names.join(", ")
                );
                self.add(Some(&name.span()), &key(), message);
                0
            })
    }

    fn into_error(self) -> FileError {
        FileError {
            problems: self.found,
            more: self.more,
        }
    }
}

/// Where each entry of the file begins.
struct Spots {
    groups: Vec<usize>,
    components: Vec<usize>,
    arrangement: Option<usize>,
    ranks: Vec<(usize, Vec<usize>)>,
}

impl Spots {
    fn of(document: &Document) -> Spots {
        Spots {
            groups: document
                .page_group
                .iter()
                .map(|entry| entry.span().start)
                .collect(),
            components: document
                .component
                .iter()
                .map(|entry| entry.span().start)
                .collect(),
            arrangement: document.arrangement.as_ref().map(|entry| entry.span().start),
            ranks: document
                .rank
                .iter()
                .map(|entry| {
                    let placements = entry.get_ref().placement.iter();
                    (
                        entry.span().start,
                        placements.map(|placement| placement.span().start).collect(),
                    )
                })
                .collect(),
        }
    }

    /// Where the entry of a fault's field begins.
    fn of_fault(&self, envelope: &Envelope, field: &str) -> Option<usize> {
        let mut path = field.split('.');
        match path.next()? {
            "page_group" => {
                let rest = field.strip_prefix("page_group.")?;
                let names = envelope.page_groups.iter().map(|group| group.name.as_str());
                self.groups.get(named(names, rest)?).copied()
            }
            "component" => {
                let rest = field.strip_prefix("component.")?;
                let names = envelope
                    .components
                    .iter()
                    .map(|component| component.name.as_str());
                self.components.get(named(names, rest)?).copied()
            }
            "rank" => {
                let Some((start, placements)) = path
                    .next()
                    .and_then(|at| self.ranks.get(at.parse::<usize>().ok()?))
                else {
                    return self.arrangement;
                };
                let placement = match path.next() {
                    Some("placement") => path
                        .next()
                        .and_then(|at| placements.get(at.parse::<usize>().ok()?)),
                    _ => None,
                };
                Some(*placement.unwrap_or(start))
            }
            _ => None,
        }
    }
}

/// The last entry whose name, or position, `rest` begins with: names may hold dots, and of two entries of one name
/// the second is at fault.
fn named<'a>(names: impl Iterator<Item = &'a str>, rest: &str) -> Option<usize> {
    let begins = |label: &str| {
        rest.strip_prefix(label)
            .is_some_and(|tail| tail.is_empty() || tail.starts_with('.'))
    };
    let mut found = None;
    let mut longest = 0;
    for (at, name) in names.enumerate() {
        if begins(name) && name.len() >= longest {
            longest = name.len();
            found = Some(at);
        } else if found.is_none() && begins(&at.to_string()) {
            found = Some(at);
        }
    }
    found
}
