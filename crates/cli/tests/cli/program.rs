//! Runs the built `kvferry` on envelopes of a test.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kvferry_handshake::{Envelope, Kind, Unit};
use tempfile::TempDir;

/// Two envelope files, and `kvferry` to run on them.
pub(crate) struct Programs {
    dir: TempDir,
}

impl Programs {
    /// Writes both envelopes as files.
    pub(crate) fn new(prefill: &Envelope, decode: &Envelope) -> Programs {
        Programs::with_files(&prefill.to_toml(), &decode.to_toml())
    }

    /// Writes two files.
    pub(crate) fn with_files(prefill: &str, decode: &str) -> Programs {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("prefill.toml"), prefill).unwrap();
        fs::write(dir.path().join("decode.toml"), decode).unwrap();
        Programs { dir }
    }

    /// A file of the pair.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs `kvferry COMMAND --prefill ... --decode ... ARGUMENTS`.
    pub(crate) fn run<'a>(&self, command: &str, arguments: impl IntoIterator<Item = &'a str>) -> Output {
        let mut kvferry = Command::new(env!("CARGO_BIN_EXE_kvferry"));
        kvferry
            .arg(command)
            .arg("--prefill")
            .arg(self.file("prefill.toml"));
        kvferry
            .arg("--decode")
            .arg(self.file("decode.toml"))
            .args(arguments);
        kvferry.output().unwrap()
    }

    /// Runs `kvferry plan`.
    pub(crate) fn plan(
        &self,
        policy: &str,
        rank: u32,
        from: u64,
        to: u64,
        prefill: &[Vec<Vec<u32>>],
        decode: &[Vec<u32>],
    ) -> Output {
        let (rank, tokens) = (rank.to_string(), format!("{from}..{to}"));
        let mut arguments = vec!["--policy", policy, "--rank", &rank, "--tokens", &tokens];
        let envelope = |name| Envelope::from_toml(&fs::read_to_string(self.file(name)).unwrap()).unwrap();
        let decode = lists_text(&envelope("decode.toml"), decode);
        let engine = envelope("prefill.toml");
        let prefill: Vec<String> = prefill
            .iter()
            .enumerate()
            .map(|(rank, lists)| format!("{rank}:{}", lists_text(&engine, lists)))
            .collect();
        arguments.extend(["--decode-pages", &decode]);
        for lists in &prefill {
            arguments.extend(["--prefill-pages", lists]);
        }
        self.run("plan", arguments)
    }
}

fn lists_text(envelope: &Envelope, lists: &[Vec<u32>]) -> String {
    let mut text = String::new();
    for (group, list) in envelope.page_groups.iter().zip(lists) {
        let pages: Vec<String> = list
            .iter()
            .map(|page| {
                if *page == u32::MAX {
                    "-".to_owned()
                } else {
                    page.to_string()
                }
            })
            .collect();
        write!(
            text,
            "{}{}={}",
            if text.is_empty() { "" } else { ";" },
            group.name,
            pages.join(",")
        )
        .unwrap();
    }
    text
}

/// Page lists for `tokens` tokens, scattered by stepping through the pool; pages that a window left are absent.
pub(crate) fn page_lists(envelope: &Envelope, rank: u32, tokens: u64, step: u32) -> Vec<Vec<u32>> {
    let dcp_rank = envelope.ranks[rank as usize].dcp_rank;
    let of_group = |(at, group): (usize, &kvferry_handshake::PageGroup)| {
        let component = envelope
            .components
            .iter()
            .find(|one| usize::from(one.page_group) == at)
            .unwrap();
        let local = |tokens: u64| {
            let owner = |token: &u64| {
                let dcp = component.dcp;
                dcp.size == 1
                    || token / u64::from(dcp.interleave) % u64::from(dcp.size) == u64::from(dcp_rank)
            };
            (0..tokens).filter(owner).count() as u64
        };
        let page_size = u64::from(group.page_size);
        let entries = match component.unit {
            Unit::Slot => 1,
            Unit::Token | Unit::Page => local(tokens).div_ceil(page_size),
        };
        let kept = match component.kind {
            Kind::Window => tokens.saturating_sub(component.window.unwrap().into()),
            _ => 0,
        };
        // A step that shares no factor with the pool visits each page once.
        let step = (step..).find(|step| gcd(*step, group.pool_pages) == 1).unwrap();
        let page = |entry: u64| match (entry + 1) * page_size > kept {
            true => u32::try_from((entry + 1) * u64::from(step) % u64::from(group.pool_pages)).unwrap(),
            false => u32::MAX,
        };
        (0..entries).map(page).collect()
    };
    envelope.page_groups.iter().enumerate().map(of_group).collect()
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The documented examples.
pub(crate) fn example(name: &str) -> String {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/examples");
    fs::read_to_string(dir.join(name)).unwrap()
}

pub(crate) fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

pub(crate) fn mha() -> Programs {
    Programs::with_files(&example("mha-prefill.toml"), &example("mha-decode.toml"))
}

/// Of `plan`: the first page of each side's first rank.
pub(crate) const ONE_PAGE: [&str; 8] = [
    "--rank",
    "0",
    "--tokens",
    "0..4",
    "--prefill-pages",
    "1",
    "--decode-pages",
    "1",
];
