//! Log-probabilities of prompts are computed in chunks, and other requests get tokens between the chunks.

use crate::inference::engine::{ROOMY, collect, prompt, run};
use crate::setup::{config, decoder, devices, recipe};
use ottava_engine::{Engine, EngineOptions, Event, Request, RequestId};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::Device;
use serde_json::json;
use std::collections::BTreeMap;

/// A vocabulary for which a step scores 32 rows of logits.
const VOCABULARY: usize = 131_072;
const ROWS: usize = 32;
/// The number of tokens of a request that decodes.
const CHAT: usize = 8;
/// The number of tokens of a prompt that takes several steps.
const LONG: usize = 72;

fn wide() -> Engine {
    wide_on(&Device::Cpu)
}

fn wide_on(device: &Device) -> Engine {
    let sizes = config(json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
        "tie_word_embeddings": true,
    }));
    let model = decoder(&sizes, &recipe(RecipeName::Fp32, Fp8Format::Auto), device, 0.3);
    Engine::new(model, &EngineOptions { prefill_chunk: 128, ..ROOMY }).expect("memory")
}

fn scored(name: &str, tokens: usize) -> Request {
    Request { prompt: prompt(name, tokens), max_new_tokens: 1, prompt_logprobs: Some(2), ..Request::default() }
}

fn add(engine: &mut Engine, request: Request) -> RequestId {
    engine.add(request).expect("it fits")
}

#[test]
fn scored_prompts_leave_steps_to_others() {
    let mut engine = wide();
    let chat = add(&mut engine, Request { prompt: prompt("chat", 3), max_new_tokens: CHAT, ..Request::default() });
    engine.step().unwrap();
    let long: Vec<RequestId> = ["a", "b"].map(|name| add(&mut engine, scored(name, LONG))).into();
    let late = add(&mut engine, Request { prompt: prompt("late", 5), max_new_tokens: 2, ..Request::default() });
    let (mut got, mut ends, mut late_step) = (BTreeMap::new(), Vec::new(), None);
    for step in 1.. {
        let events = engine.step().unwrap();
        let drawn =
            |id| events.iter().filter(|event| matches!(event, Event::Token { id: of, .. } if *of == id)).count();
        assert_eq!(drawn(chat), usize::from(step < CHAT), "step {step} has a token of the request that decodes");
        late_step = late_step.or((drawn(late) > 0).then_some(step));
        ends.extend(events.iter().filter_map(|event| match event {
            Event::Prompt { id, .. } => Some((*id, step)),
            _ => None,
        }));
        collect(events, &mut got);
        if ends.len() == 2 {
            break;
        }
    }
    assert_eq!(late_step, Some(1), "a prompt that is not scored passes those that wait for it");
    // If one or two other requests decode, a step scores one or two rows. Afterwards, it scores ROWS rows.
    let (first, last) = (ends[0].1, ends[1].1);
    assert!(first > CHAT, "{ends:?}");
    let most = CHAT + (2 * LONG).div_ceil(ROWS);
    assert!((most - 2..=most).contains(&last), "{ends:?}: the last of {most} steps at most");
    // The bits are the same as in one chunk, since log-probabilities of the beginning of a prompt do not depend on the rest.
    let alone = run(&mut wide(), vec![scored("a", LONG)]).remove(0);
    assert_eq!(got[&long[0]].prompt, alone.prompt);
    let mut short = scored("a", LONG);
    short.prompt.truncate(ROWS / 2);
    assert_eq!(run(&mut wide(), vec![short]).remove(0).prompt, alone.prompt[..ROWS / 2]);
}

/// Prompts share the rows of a step, also if a step scores fewer rows than there are prompts.
#[test]
fn short_prompts_are_scored_before_long_ones_that_came_first() {
    const SHORT: usize = 4;
    for others in [0, 1] {
        let mut engine = wide();
        for _ in 0..others {
            add(&mut engine, Request { prompt: prompt("chat", 3), max_new_tokens: 4 * LONG, ..Request::default() });
        }
        let long = ["a", "b"].map(|name| add(&mut engine, scored(name, LONG)));
        engine.step().unwrap();
        let short = add(&mut engine, scored("c", SHORT));
        let mut ends = Vec::new();
        // Each prompt has a third of the rows: the short prompt gets at least 1 row in 3 steps.
        for step in 1..=6 * SHORT {
            let scored = |event| if let Event::Prompt { id, .. } = event { Some((id, step)) } else { None };
            ends.extend(engine.step().unwrap().into_iter().filter_map(scored));
        }
        assert_eq!(ends[0].0, short, "beside {others} others: {ends:?}, and {long:?} came first");
    }
}

/// A GPU finds up to one likeliest token, and the host finds more. Without a GPU, nothing is compared.
#[test]
fn prompts_are_scored_alike_on_all_devices() {
    let scored = |device: &Device, top| {
        let request = Request { prompt_logprobs: Some(top), ..scored("a", LONG) };
        run(&mut wide_on(device), vec![request]).remove(0).prompt
    };
    let all = devices();
    let right: Vec<_> = all[1..].iter().take(1).flat_map(|_| scored(&Device::Cpu, 2)).collect();
    for (device, top) in all[1..].iter().flat_map(|device| [0, 1, 2].map(|top| (device, top))) {
        let found = scored(device, top);
        assert_eq!((found.len(), &found[0]), (LONG, &None));
        for (found, right) in found.iter().zip(&right).filter_map(|(found, right)| found.as_ref().zip(right.as_ref())) {
            // In F32, logits of two devices differ by tens of units of 2⁻²⁴ of their size, which is about 1. If a logit of 1 were rounded to BF16, it
            // would change by up to 2⁻⁸, 4e-3.
            let close = |a: f32, b: f32| (a - b).abs() < 2e-3;
            assert!(found.token == right.token && close(found.logprob, right.logprob), "{found:?} {right:?}");
            assert_eq!(found.top.len(), top);
            let is_alike = |(a, b): (&(u32, f32), &(u32, f32))| close(a.1, b.1);
            assert!(found.top.iter().zip(&right.top).all(is_alike), "{found:?} {right:?}");
        }
    }
}
