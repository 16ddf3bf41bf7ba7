//! The bodies of messages: hellos, calls and faults as bytes.

use super::frame::{Fields, put_text};
use crate::comm::call::{Call, Op, Reduce};
use crate::comm::fault::Fault;
use crate::dtype::DType;
use std::time::Duration;

/// All types, by their number in a message.
pub const DTYPES: [DType; 11] = [
    DType::F64,
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::E4M3,
    DType::E5M2,
    DType::E8M0,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::U8,
];

/// Stands for "no type".
const NO_DTYPE: u8 = u8::MAX;

fn dtype_code(dtype: DType) -> u8 {
    DTYPES.iter().position(|known| *known == dtype).expect("all types are listed") as u8
}

/// The identity that a rank sends to rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub rank: usize,
    pub size: usize,
    /// For example "pid 4242 on host x".
    pub process: String,
    pub identity: Vec<(String, String)>,
}

impl Hello {
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        for number in [self.rank, self.size, self.identity.len()] {
            body.extend((number as u64).to_le_bytes());
        }
        put_text(&mut body, &self.process);
        for (name, value) in &self.identity {
            put_text(&mut body, name);
            put_text(&mut body, value);
        }
        body
    }

    pub fn decode(body: &[u8]) -> Option<Hello> {
        let mut fields = Fields(body);
        let (rank, size, entries) = (fields.index()?, fields.index()?, fields.index()?);
        let process = fields.text()?;
        let mut identity = Vec::new();
        for _ in 0..entries {
            identity.push((fields.text()?, fields.text()?));
        }
        fields.0.is_empty().then_some(Hello { rank, size, process, identity })
    }
}

/// A call in the form in which a rank sends it to rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CallHead {
    /// The number of its answer.
    pub request: u64,
    /// The number of the group.
    pub group: u64,
    /// The number of the call in its channel.
    pub number: u64,
    pub call: Call,
}

/// The head of a call's message, before the data.
pub(super) fn encode_call(CallHead { request, group, number, call }: &CallHead) -> Vec<u8> {
    let (op, argument) = match call.op {
        Op::AllGather => (0, 0),
        Op::ReduceScatter { output } => (1, u64::from(dtype_code(output))),
        Op::AllReduce(Reduce::Sum) => (2, 0),
        Op::AllReduce(Reduce::Max) => (2, 1),
        Op::AllToAll => (3, 0),
        Op::Broadcast { root } => (4, root as u64),
        Op::Barrier => (5, 0),
        Op::Agree => (6, 0),
        Op::Split => (7, 0),
        Op::Send { to } => (8, to as u64),
        Op::Receive { from } => (9, from as u64),
        Op::Announce { root } => (10, root as u64),
    };
    let mut body: Vec<u8> = [request, group, number].into_iter().flat_map(|number| number.to_le_bytes()).collect();
    body.extend([op, call.dtype.map_or(NO_DTYPE, dtype_code)]);
    body.extend(argument.to_le_bytes());
    body.extend((call.elements as u64).to_le_bytes());
    put_text(&mut body, &call.name);
    body
}

/// The head of a call and its data.
pub(super) fn decode_call(body: &[u8]) -> Option<(CallHead, Vec<u8>)> {
    let mut fields = Fields(body);
    let (request, group, number) = (fields.number()?, fields.number()?, fields.number()?);
    let (op, dtype) = (fields.byte()?, fields.byte()?);
    let (argument, elements, name) = (fields.index()?, fields.index()?, fields.text()?);
    let op = match (op, argument) {
        (0, _) => Op::AllGather,
        (1, output) => Op::ReduceScatter { output: *DTYPES.get(output)? },
        (2, 0) => Op::AllReduce(Reduce::Sum),
        (2, 1) => Op::AllReduce(Reduce::Max),
        (3, _) => Op::AllToAll,
        (4, root) => Op::Broadcast { root },
        (5, _) => Op::Barrier,
        (6, _) => Op::Agree,
        (7, _) => Op::Split,
        (8, to) => Op::Send { to },
        (9, from) => Op::Receive { from },
        (10, root) => Op::Announce { root },
        _ => return None,
    };
    let dtype = if dtype == NO_DTYPE { None } else { Some(*DTYPES.get(usize::from(dtype))?) };
    let call = Call { op, name, dtype, elements };
    Some((CallHead { request, group, number, call }, fields.0.to_vec()))
}

pub(super) fn encode_fault(fault: &Fault) -> Vec<u8> {
    let mut body = Vec::new();
    match fault {
        Fault::Desync(message) => {
            body.push(0);
            put_text(&mut body, message);
        }
        Fault::Lost { rank, process, silent, details } => {
            body.push(if silent.is_some() { 2 } else { 1 });
            body.extend((*rank as u64).to_le_bytes());
            body.extend((silent.unwrap_or_default().as_millis() as u64).to_le_bytes());
            put_text(&mut body, process);
            put_text(&mut body, details.as_deref().unwrap_or_default());
        }
        Fault::Late(message) => {
            body.push(3);
            put_text(&mut body, message);
        }
    }
    body
}

pub(super) fn decode_fault(body: &[u8]) -> Option<Fault> {
    let mut fields = Fields(body);
    match fields.byte()? {
        0 => fields.text().map(Fault::Desync),
        how @ (1 | 2) => {
            let (rank, limit, process) = (fields.index()?, fields.number()?, fields.text()?);
            let details = fields.text().filter(|details| !details.is_empty());
            Some(Fault::Lost { rank, process, silent: (how == 2).then(|| Duration::from_millis(limit)), details })
        }
        3 => fields.text().map(Fault::Late),
        _ => None,
    }
}
