//! The error catalogue as a page.

use std::fmt::Write;

use crate::catalogue::{Area, Code, Retry};

const AREAS: &[(Area, &str, &str)] = &[
    (
        Area::Envelope,
        "One envelope",
        "An envelope is checked by itself when an engine attaches and when a file is read.",
    ),
    (
        Area::Verdict,
        "Two envelopes",
        "The comparison of a prefill engine with a decode engine. A refused pair is never linked; `kvferry check` runs \
         the same comparison on files.",
    ),
    (
        Area::Attach,
        "Attaching and registering",
        "Between an engine and its daemon, before any transfer.",
    ),
    (
        Area::Transfer,
        "Transfers",
        "Why a publish or fetch is refused, or how it ended.",
    ),
    (
        Area::Peer,
        "Between daemons",
        "Peers, their channel and its protocol.",
    ),
    (
        Area::Input,
        "Frames and files",
        "What comes from outside and cannot be understood.",
    ),
];

/// The whole catalogue in Markdown: docs/errors.md.
pub fn errors_page() -> String {
    let mut page = String::from(
        "# Errors\n\nEvery refusal and failure carries a stable code. `kvferry explain CODE` prints its entry. \
         This page is generated from the catalogue in `crates/handshake/src/catalogue.rs`; do not edit it by \
         hand: `KVFERRY_WRITE_DOCS=1 cargo test -p kvferry-handshake --test catalogue` writes it again.\n\n\
         *Retry* says whether trying again unchanged can help.\n",
    );
    for (area, title, about) in AREAS {
        let _ = write!(page, "\n## {title}\n\n{about}\n");
        for entry in Code::ALL
            .iter()
            .map(|code| code.entry())
            .filter(|entry| entry.area == *area)
        {
            let retry = match entry.retry {
                Retry::Yes => "yes, after a pause",
                Retry::No => "no",
            };
            let _ = write!(
                page,
                "\n### `{}`\n\n{}\n\n- Trigger: {}\n- Fix: {}\n- Retry: {retry}\n",
                entry.name, entry.means, entry.trigger, entry.fix
            );
        }
    }
    page
}
