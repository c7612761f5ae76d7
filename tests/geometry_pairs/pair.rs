//! One pair of engines through the built `kvferry`: its verdict under both policies, and its plan.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::PathBuf;
use std::process::{Command, Output};

use kvferry_tests::programs::kvferry;
use serde_json::Value;
use tempfile::TempDir;

use crate::engine_file::Engine;
use crate::reference::{Memory, Move, Reference, apply};

/// What must come out.
pub(crate) enum Expected {
    /// Linked, and every destination byte is that of the element-by-element copy.
    Exact,
    /// Refused, with this code, and these values of the prefill and the decode side.
    Refused(&'static str, [&'static str; 2]),
}

/// Two envelope files.
pub(crate) struct Pair {
    dir: TempDir,
    texts: [String; 2],
}

impl Pair {
    pub(crate) fn new(prefill: &Engine, decode: &Engine) -> Pair {
        let dir = tempfile::tempdir().unwrap();
        let texts = [prefill.text("prefill"), decode.text("decode")];
        for (name, text) in ["prefill.toml", "decode.toml"].iter().zip(&texts) {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        Pair { dir, texts }
    }

    /// The same files, but verified as if the decode side were this engine.
    pub(crate) fn mistaken_for(mut self, decode: &Engine) -> Pair {
        self.texts[1] = decode.text("decode");
        self
    }

    /// Checks the pair's verdicts, and where it is linked its plans: at all lengths under the stricter policy that
    /// links it, at one under the other.
    pub(crate) fn expect(&self, strict: Expected, bridge: Expected) {
        let mut planned = false;
        for (policy, expected) in [("strict", strict), ("bridge", bridge)] {
            match expected {
                Expected::Refused(code, values) => self.is_refused(policy, code, values),
                Expected::Exact => {
                    self.is_linked(policy);
                    self.is_exact(policy, planned);
                    planned = true;
                }
            }
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn run(&self, command: &str, arguments: &[&str]) -> Output {
        Command::new(kvferry())
            .arg(command)
            .arg("--prefill")
            .arg(self.file("prefill.toml"))
            .arg("--decode")
            .arg(self.file("decode.toml"))
            .args(arguments)
            .output()
            .unwrap()
    }

    fn is_linked(&self, policy: &str) {
        let output = self.run("check", &["--policy", policy]);
        assert_eq!(output.status.code(), Some(0), "{policy}: {output:?}");
    }

    fn is_refused(&self, policy: &str, code: &str, values: [&str; 2]) {
        let said = self.run("check", &["--policy", policy]);
        let text = String::from_utf8(said.stdout).unwrap();
        assert_eq!(said.status.code(), Some(3), "{policy}: {text}");
        assert!(text.contains(code), "{policy}: {code} in {text}");
        let json = self.run("check", &["--policy", policy, "--json"]);
        assert_eq!(json.status.code(), Some(3));
        let verdict: Value = serde_json::from_slice(&json.stdout).unwrap();
        let mismatches = verdict["mismatches"].as_array().unwrap();
        let named = mismatches.iter().filter(|mismatch| mismatch["code"] == code);
        let with_values = named.filter(|mismatch| {
            let value = |side: &str| mismatch[side].as_str().unwrap();
            value("prefill").contains(values[0]) && value("decode").contains(values[1])
        });
        let mut count = 0;
        for mismatch in with_values {
            count += 1;
            // The person's text has the same values, and what to set.
            for key in ["field", "prefill", "decode"] {
                let value = mismatch[key].as_str().unwrap();
                assert!(text.contains(value), "{key} {value:?} in {text}");
            }
            assert!(!mismatch["fix"].as_str().unwrap().is_empty());
        }
        assert!(count > 0, "{policy}: {code} with {values:?} in {verdict:#}");
        // There is no plan for such a pair.
        let pages = ["--prefill-pages", "0", "--decode-pages", "0"];
        let plan = self.run(
            "plan",
            &[
                &["--policy", policy, "--rank", "0", "--tokens", "0..1"][..],
                &pages,
            ]
            .concat(),
        );
        assert_eq!(plan.status.code(), Some(3), "{plan:?}");
        assert!(plan.stdout.is_empty() && String::from_utf8_lossy(&plan.stderr).contains(code));
    }

    /// Plans every decode rank at every length and prefix, and applies the moves; or at one length only.
    fn is_exact(&self, policy: &str, briefly: bool) {
        let [prefill, decode] = self.references();
        let page = prefill.page_size().max(decode.page_size());
        let mut lengths = BTreeSet::from([1, page - 1, page, page + 1, 4 * page + 3, 1000]);
        if briefly {
            lengths = BTreeSet::from([page + 1]);
        }
        for to in lengths {
            let all_but_one_page = to.saturating_sub(1) / page * page;
            let held = BTreeSet::from([0, page.min(to), all_but_one_page, to]);
            self.is_exact_at(policy, &held, to, 0..decode.ranks());
        }
    }

    fn references(&self) -> [Reference; 2] {
        [0, 1].map(|side: usize| Reference::new(&self.texts[side]))
    }

    /// Plans some decode ranks for tokens from each of `held` up to `to`; gives the number of moves.
    pub(crate) fn is_exact_at(
        &self,
        policy: &str,
        held: &BTreeSet<u64>,
        to: u64,
        ranks: Range<u64>,
    ) -> usize {
        let [prefill, decode] = self.references();
        let pages: Vec<Vec<u64>> = (0..prefill.ranks()).map(|rank| prefill.pages(rank, to)).collect();
        let sources: Vec<Memory> = (0u64..)
            .zip(&pages)
            .map(|(rank, pages)| prefill.memory(rank, pages, 0, to).0)
            .collect();
        let mut count = 0;
        for rank in ranks {
            let decode_pages = decode.pages(rank, to);
            for from in held {
                let moves = self.plan(policy, rank, *from..to, &pages, &decode_pages);
                let (expected, bytes) = decode.memory(rank, &decode_pages, *from, to);
                let mut target = decode.untouched(rank);
                let moved = apply(&moves, &sources, &mut target);
                assert!(target == expected, "{policy}, rank {rank}, tokens {from} to {to}");
                assert_eq!(moved, bytes, "each byte is moved once");
                count += moves.len();
            }
        }
        count
    }

    fn plan(
        &self,
        policy: &str,
        rank: u64,
        tokens: Range<u64>,
        prefill_pages: &[Vec<u64>],
        decode_pages: &[u64],
    ) -> Vec<Move> {
        let list = |pages: &[u64]| {
            let pages: Vec<String> = pages.iter().map(u64::to_string).collect();
            format!("pages={}", pages.join(","))
        };
        let (rank, tokens) = (rank.to_string(), format!("{}..{}", tokens.start, tokens.end));
        let decode_pages = list(decode_pages);
        let prefill_pages: Vec<String> = (0u64..)
            .zip(prefill_pages)
            .map(|(rank, pages)| format!("{rank}:{}", list(pages)))
            .collect();
        let mut arguments = vec!["--policy", policy, "--rank", &rank, "--tokens", &tokens];
        arguments.extend(["--decode-pages", &decode_pages]);
        for pages in &prefill_pages {
            arguments.extend(["--prefill-pages", pages]);
        }
        let output = self.run("plan", &arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {output:?}");
        let lines = String::from_utf8(output.stdout).unwrap();
        lines.lines().map(read_move).collect()
    }
}

fn read_move(line: &str) -> Move {
    let value: Value = serde_json::from_str(line).unwrap();
    let number = |key: &str| value[key].as_u64().unwrap_or_else(|| panic!("{key} in {line}"));
    Move {
        source_rank: number("source_rank"),
        source_region: number("source_region"),
        source_offset: number("source_offset"),
        region: number("region"),
        offset: number("offset"),
        length: number("length"),
    }
}
