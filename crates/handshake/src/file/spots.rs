//! Where in a file the field of a fault is stated.

use super::document::Document;
use crate::envelope::Envelope;

/// Where each entry of the file begins.
pub(super) struct Spots {
    groups: Vec<usize>,
    components: Vec<usize>,
    arrangement: Option<usize>,
    ranks: Vec<(usize, Vec<usize>)>,
}

impl Spots {
    pub(super) fn of(document: &Document) -> Spots {
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
    pub(super) fn of_fault(&self, envelope: &Envelope, field: &str) -> Option<usize> {
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
