//! Anything in place of anything.

use kvferry_handshake::Framework::{Sglang, Vllm};
use kvferry_handshake::{ConvertOptions, convert};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::models::{deepseek_v3, gpt_oss, llama_8b, qwen3_next};
use crate::words;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Any number, null or text in place of any value, and any words: an answer, never a panic.
    #[test]
    fn odd_configurations_are_answered(
        which in 0usize..4,
        key in any::<prop::sample::Index>(),
        value in prop_oneof![
            Just(Value::Null), Just(json!(0)), Just(json!(1)), Just(json!(u32::MAX)), Just(json!(-1)), Just(json!(1.5)),
            Just(json!("auto")), Just(json!([])), Just(json!({})), Just(json!(true)), Just(json!(4096)),
        ],
        command in "(--(tp|pp|dcp-size|page-size|model-path|dp)( |=)?[0-9a-z=,]{0,10} ){0,4}",
    ) {
        let mut config = [llama_8b(), deepseek_v3(), gpt_oss(), qwen3_next()][which].clone();
        let keys: Vec<String> = config.as_object().unwrap().keys().cloned().collect();
        config[key.get(&keys)] = value;
        for framework in [Vllm, Sglang] {
            let found = convert(&config.to_string(), framework, &words(&command), &ConvertOptions::default());
            if let Ok(found) = found {
                prop_assert_eq!(found.envelope.validate(), Ok(()));
            }
        }
    }
}
