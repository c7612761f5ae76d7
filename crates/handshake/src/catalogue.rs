//! The error catalogue: every stable code of the project, what it means, what triggers it and how to fix it.
//!
//! A code is declared once, with its entry, by [`codes!`]; a code without an entry does not compile.
//! `docs/errors.md` is generated from [`Code::ALL`].

use std::fmt;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

macro_rules! codes {
    ($($variant:ident = $name:literal, $area:ident, $retry:ident {
        means: $means:literal, trigger: $trigger:literal, fix: $fix:literal $(,)?
    })*) => {
        /// A stable code. Its name is what messages, logs and metrics carry.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Code {
            $(#[doc = $means] $variant,)*
        }

        impl Code {
            /// Every code, in catalogue order.
            pub const ALL: &'static [Code] = &[$(Code::$variant,)*];

            /// The catalogue entry.
            pub fn entry(self) -> Entry {
                match self {
                    $(Code::$variant => Entry { name: $name, area: Area::$area, retry: Retry::$retry,
                        means: $means, trigger: $trigger, fix: $fix,
                    },)*
                }
            }
        }
    };
}

/// Where a code comes up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Area {
    /// One envelope by itself.
    Envelope,
    /// The comparison of two envelopes.
    Verdict,
    /// Attaching and registering.
    Attach,
    /// Publish, fetch and what becomes of them.
    Transfer,
    /// Between daemons.
    Peer,
    /// Frames, files and configuration.
    Input,
}

/// Whether trying again unchanged can help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Not until something is changed.
    No,
    /// Yes, after a pause.
    Yes,
}

/// A catalogue entry.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Its stable name.
    pub name: &'static str,
    /// Where it comes up.
    pub area: Area,
    /// Whether a retry can help.
    pub retry: Retry,
    /// What it means.
    pub means: &'static str,
    /// What triggers it.
    pub trigger: &'static str,
    /// How to fix it.
    pub fix: &'static str,
}

codes! {
    // --- one envelope
    EnvelopeInvalid = "envelope_invalid", Envelope, No {
        means: "A field of the envelope is out of its bounds or contradicts another.",
        trigger: "A count of zero, an id out of range, a name used twice, a limit exceeded.",
        fix: "Correct the named field; docs/envelope.md gives the bounds of each.",
    }
    PlacementOverlap = "placement_overlap", Envelope, No {
        means: "Two rows of one rank would lie over each other.",
        trigger: "A stride smaller than what it steps over, or two placements over the same bytes of a region.",
        fix: "Correct the strides or offsets of the named placements.",
    }
    // --- a pair
    Role = "role", Verdict, No {
        means: "The engine's role does not fit its side of the link.",
        trigger: "A fetch from a decode-only engine, or by a prefill-only one.",
        fix: "Swap the two envelopes, or set role to both.",
    }
    ElementUnresolved = "element_unresolved", Verdict, No {
        means: "The element type is `auto`: nobody has said what the bytes are.",
        trigger: "An envelope made before the engine resolved its KV cache dtype.",
        fix: "State the resolved type (bf16, fp16, fp8_e4m3, ...), or start the engine with it: SGLang --kv-cache-dtype, vLLM --kv-cache-dtype.",
    }
    ElementType = "element_type", Verdict, No {
        means: "The two sides store different element types.",
        trigger: "Different KV cache dtypes.",
        fix: "Set the same KV cache dtype on both: SGLang --kv-cache-dtype, vLLM --kv-cache-dtype.",
    }
    PageSize = "page_size", Verdict, No {
        means: "Pages hold different numbers of tokens.",
        trigger: "Different page (block) sizes.",
        fix: "Set SGLang --page-size and vLLM --block-size alike, or allow bridging (policy = \"bridge\" in both daemons' configuration; --policy bridge in kvferry check and plan).",
    }
    Layout = "layout", Verdict, No {
        means: "Token, head and byte are ordered differently inside a page.",
        trigger: "NHD against HND.",
        fix: "Set the same layout on both (vLLM: VLLM_KV_CACHE_LAYOUT=NHD or HND; SGLang: an attention backend of the same layout), or allow bridging (policy = \"bridge\" in both daemons' configuration; --policy bridge in kvferry check and plan).",
    }
    DcpTopology = "dcp_topology", Verdict, No {
        means: "Tokens are split over decode context-parallel ranks differently.",
        trigger: "DCP sizes or interleaves that differ, other than 1 -> N for latent components.",
        fix: "Set the same DCP size and interleave on both (SGLang --dcp-size, whose interleave is 1; vLLM --decode-context-parallel-size and --cp-kv-cache-interleave-size), or allow bridging (policy = \"bridge\" in both daemons' configuration; --policy bridge in kvferry check and plan).",
    }
    DcpNeedsLatent = "dcp_needs_latent", Verdict, No {
        means: "DCP 1 -> N is allowed for latent components only.",
        trigger: "A prefill engine without DCP and a decode engine with it, for per-head data.",
        fix: "Set the same DCP size on both (SGLang --dcp-size, vLLM --decode-context-parallel-size), or allow bridging (policy = \"bridge\" in both daemons' configuration; --policy bridge in kvferry check and plan).",
    }
    PrefillContextParallel = "prefill_context_parallel", Verdict, No {
        means: "Decode context parallelism needs a prefill context-parallel size of 1.",
        trigger: "A prefill context-parallel size above 1 on either side while either side splits tokens over DCP ranks. Without DCP any size will do: every rank holds all tokens.",
        fix: "Set the prefill context-parallel size to 1 on both (SGLang --attn-cp-size 1, vLLM --prefill-context-parallel-size 1), or start both without DCP.",
    }
    Components = "components", Verdict, No {
        means: "One side caches a component that the other does not.",
        trigger: "A draft model, scales or indexer keys on one side only.",
        fix: "Start both engines with the same model features: speculative decoding (SGLang --speculative-algorithm, vLLM --speculative-config), KV quantisation (--kv-cache-dtype), sparse attention.",
    }
    ComponentKind = "component_kind", Verdict, No {
        means: "A component of one name is of another kind, unit or window on the other side.",
        trigger: "Two different things under one name.",
        fix: "Name components by what they hold, and start both engines with the same model.",
    }
    Parts = "parts", Verdict, No {
        means: "A component's parts, their widths or their numbers of heads differ.",
        trigger: "Different head_dim, latent width or number of KV heads: another model.",
        fix: "Serve the same model on both sides.",
    }
    Scales = "scales", Verdict, No {
        means: "Quantisation scales live in different places.",
        trigger: "Scales in the checkpoint on one side and in the cache on the other.",
        fix: "Use the same KV quantisation scheme on both (SGLang --kv-cache-dtype and --quantization-param-path, vLLM --kv-cache-dtype).",
    }
    Layers = "layers", Verdict, No {
        means: "A component's global layer ids differ.",
        trigger: "Another model, or layer ids counted per pipeline stage.",
        fix: "State global layer ids; serve the same model on both sides.",
    }
    PageGroups = "page_groups", Verdict, No {
        means: "Components share page lists on one side and not on the other.",
        trigger: "Page groups composed differently.",
        fix: "Use the same settings for hybrid models on both (SGLang --disable-hybrid-swa-memory, vLLM --disable-hybrid-kv-cache-manager), or allow bridging (policy = \"bridge\" in both daemons' configuration; --policy bridge in kvferry check and plan).",
    }
    OpaqueTag = "opaque_tag", Verdict, No {
        means: "The page interiors are opaque and not of the same tag.",
        trigger: "A tiled layout on one side, or two different ones.",
        fix: "Run the same attention backend on both (SGLang --attention-backend, vLLM --attention-backend) on the same kind of processor, or one with a plain layout.",
    }
    Model = "model", Verdict, No {
        means: "The two engines serve different models.",
        trigger: "Names or weight digests differ.",
        fix: "Serve the same checkpoint; state equal weight digests where only the paths differ.",
    }
    Revision = "revision", Verdict, No {
        means: "The two engines serve different revisions of the model.",
        trigger: "Both state a revision and they differ.",
        fix: "Start both with the same --revision.",
    }
    ConfigDigest = "config_digest", Verdict, No {
        means: "The model configurations (RoPE and the like) differ.",
        trigger: "Both state a digest of the configuration and they differ.",
        fix: "Use the same configuration overrides on both (vLLM --hf-overrides, SGLang --json-model-override-args).",
    }
    NotCompared = "not_compared", Verdict, No {
        means: "A warning: only one side states an optional field, so it was not compared.",
        trigger: "A revision or digest on one side only.",
        fix: "State it on both sides.",
    }
    HeadCoverage = "head_coverage", Verdict, No {
        means: "Heads that an envelope declares, or that the decode side owns, have no place in any rank of the named side.",
        trigger: "An envelope whose ranks do not cover all heads: a rank left out, or a file cut short. The decode side's is refused as well: its engine would read what nobody filled.",
        fix: "Correct the placements: on each side, the ranks together must hold every head.",
    }
    LayerCoverage = "layer_coverage", Verdict, No {
        means: "Layers that an envelope declares, or that the decode side holds, have no place in any rank of the named side.",
        trigger: "A rank or pipeline stage left out, or a rank without placements.",
        fix: "Correct the placements: on each side, the ranks together must hold every layer.",
    }
    PartCoverage = "part_coverage", Verdict, No {
        means: "A part (such as v) has no place in any rank of the named side, in layers whose other parts have one.",
        trigger: "A placement that forgets a part.",
        fix: "Correct the placements: on each side, the ranks together must hold every part of every layer.",
    }
    TokenCoverage = "token_coverage", Verdict, No {
        means: "Tokens have no place in any rank of the named side: nobody there is their DCP rank.",
        trigger: "A DCP rank missing, or dcp_rank lines forgotten, so that all ranks are DCP rank 0.",
        fix: "Correct dcp_rank: on each side, the ranks together must be every DCP rank.",
    }
    // --- attaching and registering
    EngineNameTaken = "engine_name_taken", Attach, Yes {
        means: "Another life of the engine of this name is attached.",
        trigger: "Two engines of one name on a node, or a restart that overtakes the old processes' end.",
        fix: "Name engines apart, or try again when the old processes have ended.",
    }
    RankAttached = "rank_attached", Attach, Yes {
        means: "This rank of the engine is attached already.",
        trigger: "The same rank number started twice.",
        fix: "Give each worker its own rank, or wait until the earlier one has ended.",
    }
    RankUnknown = "rank_unknown", Attach, No {
        means: "The envelope has no such rank.",
        trigger: "A rank number at or above the number of ranks.",
        fix: "Attach with a rank that the envelope lists.",
    }
    RanksDisagree = "ranks_disagree", Attach, Yes {
        means: "Ranks of one engine sent different envelopes; all of them are refused.",
        trigger: "Workers started with different arguments, or of two lives of the engine.",
        fix: "Start all ranks with the same arguments; the named field is the first that differs.",
    }
    NotAttached = "not_attached", Attach, No {
        means: "The connection has not attached.",
        trigger: "A call before attach, or after the attachment was refused.",
        fix: "Attach first.",
    }
    RegionUnknown = "region_unknown", Attach, No {
        means: "The region number is not one of the rank's envelope, or is not registered.",
        trigger: "Registering, unregistering or using a region that is not there.",
        fix: "Use the region numbers of the rank's placements.",
    }
    RegionRegistered = "region_registered", Attach, No {
        means: "The region is registered already.",
        trigger: "Registering a number twice without unregistering it.",
        fix: "Unregister it first.",
    }
    RegionTooSmall = "region_too_small", Attach, No {
        means: "The memory is shorter than the envelope says the region is.",
        trigger: "A memfd or range shorter than the last row of the last page.",
        fix: "Allocate at least the named number of bytes, or correct pool_pages and strides.",
    }
    RegionTooLarge = "region_too_large", Attach, No {
        means: "The memory is longer than the envelope says the region is.",
        trigger: "A length beyond the last row of the last page, rounded up to 2 MiB (a huge page).",
        fix: "Register no more than the named number of bytes, or correct pool_pages and strides.",
    }
    RegionOutOfBounds = "region_out_of_bounds", Attach, No {
        means: "The range given lies outside the memory handed over.",
        trigger: "Offset plus length beyond the end of the memfd, or an address range that is not mapped.",
        fix: "Give a range inside the memory.",
    }
    RegionOverlap = "region_overlap", Attach, No {
        means: "Two regions share bytes.",
        trigger: "The same memfd range, or overlapping addresses, registered under two numbers.",
        fix: "Register each byte once; use one region with several placements.",
    }
    RegionSeals = "region_seals", Attach, No {
        means: "The memfd's seals do not fit.",
        trigger: "F_SEAL_SHRINK or F_SEAL_GROW missing, or a WRITE seal present.",
        fix: "Create the memfd with MFD_ALLOW_SEALING, size it, then add F_SEAL_SHRINK and F_SEAL_GROW only.",
    }
    RegionKind = "region_kind", Attach, No {
        means: "The fd handed over is not a memfd, the wrong number of fds came, or the process's memory is a file's.",
        trigger: "A file, socket or pipe in place of a memfd; none or several fds; addresses where the process has mapped a \
                  file.",
        fix: "Hand over exactly one memfd, or anonymous or shared memory of the process.",
    }
    RegionUnreachable = "region_unreachable", Attach, No {
        means: "The daemon cannot reach the engine's memory by any path.",
        trigger: "Memory of a process in another PID namespace, of another user than the daemon's, or that the kernel lets \
                  nobody else read (kernel.yama.ptrace_scope, prctl PR_SET_DUMPABLE).",
        fix: "Hand over a memfd. Or share the PID namespace, run daemon and engine as one user, and name the daemon with \
              PR_SET_PTRACER where kernel.yama.ptrace_scope is 1, which kvferry's own client does.",
    }
    PeerCredentials = "peer_credentials", Attach, No {
        means: "The user of the connecting process is not allowed.",
        trigger: "A user id that is not in the daemon's allow-list.",
        fix: "Add the user to allow_users in the daemon's configuration, or run the engine as one that is.",
    }
    HomeUnreachable = "home_unreachable", Attach, Yes {
        means: "The engine's home daemon cannot be reached.",
        trigger: "A rank attached with a home address at which no daemon answers.",
        fix: "Start the home daemon, or correct the address.",
    }
    // --- transfers
    LinkRefused = "link_refused", Transfer, No {
        means: "The two engines' geometry does not fit; the mismatches are listed.",
        trigger: "A fetch between engines whose verdict is refused.",
        fix: "Mend every listed mismatch; `kvferry check` runs the same comparison beforehand.",
    }
    VerdictsDiffer = "verdicts_differ", Transfer, No {
        means: "The two daemons came to different verdicts or plans.",
        trigger: "Daemons of incompatible builds.",
        fix: "Run the same release on both nodes.",
    }
    EngineUnknown = "engine_unknown", Transfer, Yes {
        means: "No engine of this name is attached at the named daemon.",
        trigger: "A fetch before the prefill engine attached, after it ended, or with a wrong name.",
        fix: "Check the address; wait until the engine's ranks are attached.",
    }
    RankMissing = "rank_missing", Transfer, Yes {
        means: "A rank of the prefill engine is not attached, or its regions are not registered.",
        trigger: "A fetch while the engine is starting or a worker has ended.",
        fix: "Wait until all ranks are attached and registered.",
    }
    AddressInvalid = "address_invalid", Transfer, No {
        means: "The source is not of the form kvferry://node:port/engine.",
        trigger: "A misspelt address in a fetch or attach.",
        fix: "Write kvferry://HOST:PORT/ENGINE.",
    }
    PagesInvalid = "pages_invalid", Transfer, No {
        means: "A page list does not fit: an id outside the pool, a page twice, or too few or too many pages.",
        trigger: "Publish or fetch with such a list.",
        fix: "Give, per page group, one page id per page of local tokens, each below pool_pages, and name each page once (groups that share a pool share no page).",
    }
    PageAbsent = "page_absent", Transfer, No {
        means: "The decode side wants tokens whose page is absent at the prefill side.",
        trigger: "A sliding window that kept fewer pages than the fetch wants.",
        fix: "Mark the same pages absent in the fetch, or publish them.",
    }
    TokensInvalid = "tokens_invalid", Transfer, No {
        means: "A token or layer range is empty where it must not be, reversed, beyond the page list, or shrinks.",
        trigger: "from > to, least outside the range, or readiness that goes backwards.",
        fix: "Correct the range.",
    }
    OpaqueAlignment = "opaque_alignment", Transfer, No {
        means: "An opaque page can only be moved whole, and the range begins inside one.",
        trigger: "A held prefix that ends inside a page of an opaque or per-page component.",
        fix: "Fetch from the last page boundary.",
    }
    MetadataTooLong = "metadata_too_long", Transfer, No {
        means: "The metadata exceeds 64 KiB.",
        trigger: "A publish with more.",
        fix: "Keep metadata small; it is for the first token and the like.",
    }
    TransferExists = "transfer_exists", Transfer, No {
        means: "The transfer id and attempt were used before.",
        trigger: "A publish after the final one, or a second fetch by the same rank.",
        fix: "Use a new transfer id, or a higher attempt.",
    }
    PageInUse = "page_in_use", Transfer, Yes {
        means: "Another open fetch of the rank writes a page that this one would write, too.",
        trigger: "Two fetches under way whose page lists share a page beyond the tokens held already.",
        fix: "Give each fetch pages of its own. Pages are free again when the rank is told that the fetch has ended.",
    }
    TransferUnknown = "transfer_unknown", Transfer, No {
        means: "There is no such transfer.",
        trigger: "abort of a transfer that is not open here, or a peer that forgot one that is.",
        fix: "Nothing; it has ended.",
    }
    StaleAttempt = "stale_attempt", Transfer, No {
        means: "A higher attempt of this transfer id is under way or has ended.",
        trigger: "A publish or fetch with a lower attempt.",
        fix: "Use the current attempt.",
    }
    Superseded = "superseded", Transfer, No {
        means: "A higher attempt took this one's place.",
        trigger: "A publish or fetch with a higher attempt.",
        fix: "Nothing; follow the new attempt.",
    }
    StaleGeneration = "stale_generation", Transfer, No {
        means: "A page list belongs to an earlier registration of its region.",
        trigger: "Publish or fetch with a generation from before a re-registration.",
        fix: "Use the generation that register returned.",
    }
    StaleIncarnation = "stale_incarnation", Transfer, Yes {
        means: "A message belongs to an earlier life of an engine or daemon.",
        trigger: "A peer or engine that restarted.",
        fix: "Fetch again; the new life answers.",
    }
    OverLimit = "over_limit", Transfer, Yes {
        means: "A bound on what may be queued is reached.",
        trigger: "More transfers, connections or page-list entries than the daemon is configured for.",
        fix: "Try again when earlier transfers have ended; raise the named limit if this is normal load.",
    }
    Short = "short", Transfer, No {
        means: "The final publish has fewer tokens than the fetch's least.",
        trigger: "A prompt shorter than the decode side was told.",
        fix: "Fetch with a smaller least, or recompute.",
    }
    Deadline = "deadline", Transfer, Yes {
        means: "Nothing moved for as long as the deadline allows.",
        trigger: "A peer that never published or fetched, a stalled network, a lost message.",
        fix: "See the phase and peer that the message names; then retry.",
    }
    LeaseExpired = "lease_expired", Transfer, No {
        means: "No decode engine came for the published pages in time.",
        trigger: "A publish that was neither fetched nor renewed with expect.",
        fix: "Let the decode side call expect while it queues; raise lease_ms.",
    }
    Declined = "declined", Transfer, No {
        means: "The decode side said that it will not fetch.",
        trigger: "decline.",
        fix: "Nothing; the pages are free.",
    }
    Aborted = "aborted", Transfer, No {
        means: "One side aborted the transfer.",
        trigger: "abort, by either engine.",
        fix: "Nothing.",
    }
    EngineGone = "engine_gone", Transfer, Yes {
        means: "The other engine's process ended, or its connection to its daemon closed.",
        trigger: "A crash, a kill, a shutdown.",
        fix: "Route the request to another engine, or retry when it is back.",
    }
    SiblingFailed = "sibling_failed", Transfer, Yes {
        means: "Another rank's part of the same transfer failed, so this one ends too.",
        trigger: "A failure on any rank of a transfer.",
        fix: "See the cause of the rank that the message names.",
    }
    Unregistered = "unregistered", Transfer, No {
        means: "The region was unregistered while the transfer used it.",
        trigger: "unregister with transfers under way.",
        fix: "Unregister after the last transfer.",
    }
    PathRequired = "path_required", Transfer, No {
        means: "The path that the operator requires is not available.",
        trigger: "require = \"rdma\" where no usable RDMA device is left.",
        fix: "Mend the device, or allow another path.",
    }
    MemoryFault = "memory_fault", Transfer, No {
        means: "The engine's memory could not be read or written.",
        trigger: "Memory that the engine unmapped without unregister, or an engine that ended.",
        fix: "Unregister before freeing memory.",
    }
    Checksum = "checksum", Transfer, Yes {
        means: "A chunk arrived with another checksum than it was sent with.",
        trigger: "Corruption on the way, or source pages that changed while they were sent.",
        fix: "Publish only what is finished; look for faulty hardware.",
    }
    DaemonRestarted = "daemon_restarted", Transfer, Yes {
        means: "The local daemon restarted; what was under way is lost.",
        trigger: "The connection to the daemon closed and came back.",
        fix: "Publish or fetch again with a higher attempt.",
    }
    Shutdown = "shutdown", Transfer, Yes {
        means: "A daemon is shutting down.",
        trigger: "SIGTERM at the daemon.",
        fix: "Retry when it is back.",
    }
    // --- peers
    PeerUnreachable = "peer_unreachable", Peer, Yes {
        means: "The peer daemon cannot be reached.",
        trigger: "No daemon at the address, or a network that drops packets.",
        fix: "Start kvferryd there; check address, port and firewall.",
    }
    PeerLost = "peer_lost", Peer, Yes {
        means: "The channel to the peer daemon broke.",
        trigger: "The peer ended or restarted, or the network failed.",
        fix: "Retry; the channel is opened again on demand.",
    }
    PeerTls = "peer_tls", Peer, No {
        means: "The TLS handshake with the peer failed.",
        trigger: "No certificate, one of another authority, or an expired one.",
        fix: "Give both daemons certificates of one authority; see docs/security.md.",
    }
    ProtocolVersion = "protocol_version", Peer, No {
        means: "There is no protocol version that both sides speak.",
        trigger: "Releases more than one apart.",
        fix: "Upgrade the older side.",
    }
    ProtocolViolation = "protocol_violation", Peer, No {
        means: "A peer or client sent what the protocol does not allow.",
        trigger: "A frame out of order, or fields that contradict each other.",
        fix: "Run the same release on both sides; report it if it persists.",
    }
    // --- input
    FrameTooLong = "frame_too_long", Input, No {
        means: "A frame exceeds its length limit.",
        trigger: "A hostile or broken sender.",
        fix: "Use the client library; split page lists that exceed the limit.",
    }
    FrameMalformed = "frame_malformed", Input, No {
        means: "A frame does not decode, or has bytes left over.",
        trigger: "Truncation, corruption or another protocol on the socket.",
        fix: "Use the client library of this release.",
    }
    FileInvalid = "file_invalid", Input, No {
        means: "A file cannot be read or parsed; the line and key are named.",
        trigger: "A misspelt key, a missing field, a wrong type.",
        fix: "Correct the named line; docs/ describes each file.",
    }
    Unknown = "unknown", Input, No {
        means: "The other side gave a code that this release does not know.",
        trigger: "A daemon or client of a newer release.",
        fix: "See the message beside it; `kvferry explain` of the newer release knows the code.",
    }
    Internal = "internal", Input, Yes {
        means: "The daemon met a state that it should not be in; the transfer was ended safely.",
        trigger: "A defect in Kvferry.",
        fix: "Please report it, with the log line.",
    }
}

impl Code {
    /// The stable name.
    pub fn name(self) -> &'static str {
        self.entry().name
    }

    /// The code of this name.
    pub fn from_name(name: &str) -> Option<Code> {
        Code::ALL.iter().copied().find(|code| code.name() == name)
    }

    /// Whether trying again unchanged can help.
    pub fn can_retry(self) -> bool {
        self.entry().retry == Retry::Yes
    }
}

/// A code travels as its stable name, so that a release may add codes.
impl Serialize for Code {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// A name that this release does not know is [`Code::Unknown`], not an error.
impl<'de> Deserialize<'de> for Code {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;

        impl Visitor<'_> for Name {
            type Value = Code;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a code")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<Code, E> {
                Ok(Code::from_name(name).unwrap_or(Code::Unknown))
            }
        }

        deserializer.deserialize_str(Name)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
