//! Envelope files, every rank written out, as text: nothing of Kvferry helps to write them.

use std::fmt::Write as _;

/// An engine, as a person would describe it.
#[derive(Clone)]
pub(crate) struct Engine {
    pub(crate) model: &'static str,
    pub(crate) revision: Option<&'static str>,
    pub(crate) tp: u32,
    /// Layers of each pipeline stage.
    pub(crate) stages: Vec<Vec<u32>>,
    /// DCP size and interleave.
    pub(crate) dcp: (u32, u32),
    pub(crate) prefill_context_parallel: u32,
    pub(crate) page_size: u32,
    pub(crate) pool_pages: u32,
    /// Head by head, and in each token by token.
    pub(crate) hnd: bool,
    pub(crate) cached: Vec<Cached>,
}

/// A component.
#[derive(Clone)]
pub(crate) struct Cached {
    pub(crate) name: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) layers: Vec<u32>,
    /// Name, heads, width.
    pub(crate) parts: Vec<(&'static str, u32, u32)>,
    pub(crate) element: &'static str,
    /// Further keys, as they stand in the file.
    pub(crate) more: &'static str,
}

impl Engine {
    pub(crate) fn tp(mut self, tp: u32) -> Engine {
        self.tp = tp;
        self
    }

    pub(crate) fn page(mut self, page_size: u32) -> Engine {
        self.pool_pages = 1100_u32.div_ceil(page_size) + 3;
        self.page_size = page_size;
        self
    }

    pub(crate) fn dcp(mut self, size: u32, interleave: u32) -> Engine {
        self.dcp = (size, interleave);
        self
    }

    pub(crate) fn element(mut self, element: &'static str) -> Engine {
        for cached in &mut self.cached {
            cached.element = element;
            if element.starts_with("fp8") {
                cached.more = "scales = \"model\"";
            }
        }
        self
    }

    pub(crate) fn with(mut self, cached: Cached) -> Engine {
        self.cached.push(cached);
        self
    }

    /// The file. The two sides keep their memory differently where policy allows it: parts in regions of their own,
    /// or one behind the other in one region.
    pub(crate) fn text(&self, role: &str) -> String {
        let mut text = String::new();
        let mut line = |line: String| writeln!(text, "{line}").unwrap();
        line(format!(
            "engine = \"{role}-0\"\nrole = \"{role}\"\nmodel = \"{}\"",
            self.model
        ));
        if let Some(revision) = self.revision {
            line(format!("revision = \"{revision}\""));
        }
        line("framework = \"test\"\nframework_version = \"1\"".to_owned());
        let context_parallel = self.prefill_context_parallel;
        line(format!("prefill_context_parallel = {context_parallel}"));
        let (page_size, pool_pages) = (self.page_size, self.pool_pages);
        line(format!(
            "[[page_group]]\nname = \"pages\"\npage_size = {page_size}\npool_pages = {pool_pages}"
        ));
        for cached in &self.cached {
            let parts = cached.parts.iter().map(|(name, heads, width)| {
                format!("{{ name = \"{name}\", heads = {heads}, width = {width} }}")
            });
            line(format!(
                "[[component]]\nname = \"{}\"\nkind = \"{}\"\npage_group = \"pages\"\nlayers = {:?}\n\
                 parts = [{}]\nelement = \"{}\"\ndcp = {{ size = {}, interleave = {} }}\n{}",
                cached.name,
                cached.kind,
                cached.layers,
                parts.collect::<Vec<_>>().join(", "),
                cached.element,
                self.dcp.0,
                self.dcp.1,
                cached.more,
            ));
        }
        for (stage, layers) in self.stages.iter().enumerate() {
            for tp_rank in 0..self.tp {
                let rank = u32::try_from(stage).unwrap() * self.tp + tp_rank;
                let dcp_rank = if self.dcp.0 > 1 { tp_rank % self.dcp.0 } else { 0 };
                line(format!("[[rank]]\nrank = {rank}\ndcp_rank = {dcp_rank}"));
                let (mut region, mut offset) = (0, 0);
                for cached in &self.cached {
                    let held = cached.layers.iter().filter(|layer| layers.contains(layer));
                    let held: Vec<u32> = held.copied().collect();
                    for part in &cached.parts {
                        let (placement, bytes) = self.placement(cached, part, &held, tp_rank, region, offset);
                        line(placement);
                        if role == "prefill" {
                            region += 1;
                        } else {
                            offset += bytes;
                        }
                    }
                }
            }
        }
        text
    }

    /// One part of a rank, layer behind layer, page behind page; and its bytes.
    fn placement(
        &self,
        cached: &Cached,
        (part, heads, width): &(&str, u32, u32),
        layers: &[u32],
        tp_rank: u32,
        region: u32,
        offset: u64,
    ) -> (String, u64) {
        let groups = self.tp / self.dcp.0;
        let at = tp_rank / self.dcp.0;
        let count = (heads / groups).max(1);
        let first = if *heads >= groups {
            at * count
        } else {
            at * heads / groups
        };
        let bytes = match cached.element {
            "bf16" | "bfloat16" | "auto" => 2,
            "fp8_e4m3" | "fp8_e5m2" => 1,
            "fp32" => 4,
            other => panic!("{other}"),
        };
        let row = u64::from(*width) * bytes;
        let by_page = cached.more.contains("opaque") || cached.more.contains("\"page\"");
        let (count, tokens) = (
            u64::from(count),
            if by_page { 1 } else { u64::from(self.page_size) },
        );
        let page = row * count * tokens;
        let (token, head) = if self.hnd {
            (row, row * tokens)
        } else {
            (row * count, row)
        };
        let layer = page * u64::from(self.pool_pages);
        let text = format!(
            "[[rank.placement]]\ncomponent = \"{}\"\nlayers = {layers:?}\nparts = [\"{part}\"]\n\
             heads = \"{first}-{}\"\nregion = {region}\noffset = {offset}\n\
             strides = {{ page = {page}, token = {token}, head = {head}, layer = {layer} }}",
            cached.name,
            u64::from(first) + count - 1,
        );
        (text, layer * layers.len() as u64)
    }
}
